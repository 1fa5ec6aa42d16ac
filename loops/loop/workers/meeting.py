"""Workers exchange errors, signals and stops between two calls."""

from __future__ import annotations

import signal
from collections.abc import Callable

from loops.loop.workers.workers import Workers
from loops.support.errors import WorkerLost
from loops.support.signals import Deferred

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def meet(
    workers: Workers, signals: Deferred, error: Exception | None, *, stopped: bool, step: Callable[[], int]
) -> int | None:
    """Makes an error, a signal or a stop on one worker take effect on all of them at the same step.

    Args:
        workers: All workers.
        signals: Those that this worker received; the others' signals are added.
        error: What an action raised here, or None.
        stopped: Whether an action here ends the run.
        step: Returns the current step; called only for a message.

    Returns:
        The first worker with an action that ends the run, or None.

    Raises:
        Exception: The error, if there is one, once the others know.
        WorkerLost: If another worker has stopped with an error.
    """
    happened = [error is not None, stopped, *(number in signals.received for number in _SIGNALS)]
    try:
        gathered = workers.gather([int(one) for one in happened])
    finally:
        if error:
            raise error
    stopped_by: int | None = None
    for worker, (failed, stops, *received) in enumerate(gathered):
        if failed:
            raise WorkerLost(
                f"worker {worker} stopped with an error after step {step()}, so worker {workers.index} stops, too: the "
                f"output of worker {worker} says why. Start all of them again to go on from what all have saved."
            )
        stopped_by = worker if stops and stopped_by is None else stopped_by
        signals.received += [
            number for number, one in zip(_SIGNALS, received, strict=True) if one and number not in signals.received
        ]
    return stopped_by
