"""Where workers tell each other, between two calls, what happened to them."""

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
    """Has what happened on one worker happen on all of them at the same step.

    Args:
        workers: All of them.
        signals: Those that this worker received; those of the others are added.
        error: What an action raised here, or None.
        stopped: Whether an action here ends the run.
        step: Returns the step of which all of them are; called only to name it.

    Returns:
        The first worker whose actions end the run, or None.

    Raises:
        Exception: The error, if there is one, once the others know.
        WorkerLost: If another worker has stopped with an error.
    """
    happened = [error is not None, stopped, *(number in signals.received for number in _SIGNALS)]
    try:
        told = workers.gather([int(one) for one in happened])
    finally:
        if error:
            raise error
    stopped_by: int | None = None
    for worker, (failed, stops, *received) in enumerate(told):
        if failed:
            raise WorkerLost(
                f"worker {worker} stopped with an error after step {step()}, and so worker {workers.index} stops, too: "
                f"the output of worker {worker} says why. Start all of them again to go on from what all have saved."
            )
        stopped_by = worker if stops and stopped_by is None else stopped_by
        signals.received += [
            number for number, one in zip(_SIGNALS, received, strict=True) if one and number not in signals.received
        ]
    return stopped_by
