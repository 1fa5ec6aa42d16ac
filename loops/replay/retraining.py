"""Repeats a run from its first step with another strategy."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

import scaler
from loops.loop.loop import Loop
from loops.run.rewind.open import open_run
from loops.step.train_step import TrainStep
from loops.support.errors import LoopError, OutOfData
from loops.support.signals import deferred_signals


class History(NamedTuple):
    """The attempted steps of a run.

    Attributes:
        step: Int64 [steps], the steps' numbers.
        scales: Float32 [steps].
        skipped: Bool [steps].
        loss: Float64 [steps].
    """

    step: np.ndarray
    scales: np.ndarray
    skipped: np.ndarray
    loss: np.ndarray


def again(run: pathlib.Path, build_with: str | None) -> Loop:
    """The loop of a recorded run before its first step, with the probes that it had.

    Args:
        run: The run's folder.
        build_with: The argument of `halfstep explain --build`; None for a run of `halfstep train`.

    Raises:
        LoopError: If the loop cannot be built again.
        scaler.InvalidArgument: If the folder or the function does not exist.
    """
    if run.is_file():
        raise scaler.InvalidArgument(
            f"{run}: a trace alone is not enough to train again: expected the folder of its run, the --out of halfstep "
            "train, or that of a program and --build."
        )
    return open_run(run, build_with)


def change_strategy(loop: Loop, strategy: scaler.Strategy) -> None:
    """Makes the loop's step scale with another strategy, from its initial state.

    Raises:
        LoopError: If the step is not a `TrainStep`, which has one loss scaler.
    """
    step = loop.train_step
    if not isinstance(step, TrainStep) or step.layerwise is not None:
        raise LoopError(
            "cannot change the strategy of this run: its train step is not a loops.TrainStep with a single loss scale."
        )
    step.loss_scaler = scaler.LossScaler(strategy)


def train_again(loop: Loop, steps: int, progress: Callable[[int], object] | None = None) -> History:
    """Takes steps without calling any action.

    Args:
        loop: A loop before its first step.
        steps: The number of batches to take.
        progress: Called with the number of batches taken, after each call.

    Raises:
        OutOfData: If the dataset ends before.
    """
    parts: list[Mapping[str, np.ndarray]] = []
    with deferred_signals() as signals:
        while (done := loop.counters.data) < steps:
            taken, outputs = loop.take(min(loop.longest_call, steps - done))
            if not taken:
                raise OutOfData(f"the dataset ended after {done} steps, but the trace has {steps}.")
            parts.append(outputs)
            signals.act()
            if progress:
                progress(done + taken)
    return history_of({name: np.concatenate([part[name] for part in parts]) for name in _NAMES}, 1)


_NAMES = ("attempted", "applied", "loss_scale", "loss")


def history_of(outputs: Mapping[str, np.ndarray], first: int) -> History:
    """The attempted steps among some steps.

    Args:
        outputs: The outputs of the steps by name, arrays [steps].
        first: The number of the first step.
    """
    attempted = np.asarray(outputs["attempted"]).astype(bool)
    return History(
        np.flatnonzero(attempted) + first,
        np.asarray(outputs["loss_scale"], np.float32)[attempted],
        ~np.asarray(outputs["applied"]).astype(bool)[attempted],
        np.asarray(outputs["loss"], np.float64)[attempted],
    )
