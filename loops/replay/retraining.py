"""A run taken again from its first step, with another strategy."""

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
    """What a run did at each step that it attempted.

    Attributes:
        step: Int64 [steps], their numbers.
        scales: Float32 [steps].
        skipped: Bool [steps].
        loss: Float64 [steps].
    """

    step: np.ndarray
    scales: np.ndarray
    skipped: np.ndarray
    loss: np.ndarray


def again(run: pathlib.Path, build_with: str | None) -> Loop:
    """The loop of a recorded run before its first step, measured as it was then.

    Args:
        run: The run's folder.
        build_with: As for `halfstep explain --build`; None for a run of `halfstep train`.

    Raises:
        LoopError: If it cannot be had.
        scaler.InvalidArgument: For no such folder or function.
    """
    if run.is_file():
        raise scaler.InvalidArgument(
            f"{run}: a trace alone does not say how to train: expected the folder of its run, the --out of halfstep "
            "train, or that of a program and --build."
        )
    return open_run(run, build_with)


def change_strategy(loop: Loop, strategy: scaler.Strategy) -> None:
    """Has the loop's step scale by another strategy, from its first state on.

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
    """Takes steps, with no action to hear of them.

    Args:
        loop: Before its first step.
        steps: How many batches to take.
        progress: Called with how many were taken, after each call.

    Raises:
        OutOfData: If the dataset ends before.
    """
    parts: list[Mapping[str, np.ndarray]] = []
    with deferred_signals() as signals:
        while (done := loop.counters.data) < steps:
            taken, outputs = loop.take(min(loop.longest_call, steps - done))
            if not taken:
                raise OutOfData(f"the dataset ended after {done} steps, and the trace has {steps}.")
            parts.append(outputs)
            signals.act()
            if progress:
                progress(done + taken)
    return course({name: np.concatenate([part[name] for part in parts]) for name in _NAMES}, 1)


_NAMES = ("attempted", "applied", "loss_scale", "loss")


def course(outputs: Mapping[str, np.ndarray], first: int) -> History:
    """What a step returned, by name, of the steps from `first` on, as a course."""
    attempted = np.asarray(outputs["attempted"]).astype(bool)
    return History(
        np.flatnonzero(attempted) + first,
        np.asarray(outputs["loss_scale"], np.float32)[attempted],
        ~np.asarray(outputs["applied"]).astype(bool)[attempted],
        np.asarray(outputs["loss"], np.float64)[attempted],
    )
