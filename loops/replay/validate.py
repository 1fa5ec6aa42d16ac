"""Checks a replay's prediction by training with the strategy."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import scaler
from loops.replay.intervals import DIFFERENCE, Tail, tail_of
from loops.replay.live import History, Side, again, change_strategy, side_of, train_again
from loops.replay.recording import Recording
from loops.replay.replay import replay_recordings
from loops.replay.results import Replayed, cells
from loops.support.errors import LoopError

_SHOWN = ("mean_log2_scale", "final_scale")


@dataclasses.dataclass(frozen=True)
class Validated:
    """A replayed strategy compared with a run that was trained with it.

    Attributes:
        replayed: The replay's prediction.
        trained: The run.
        agreement: The share of steps with the same scale.
        same_skips: Whether the same steps were skipped.
        parts_at: The first step with another scale; None if there is none.
        parted_by: A description of the step before that, which made the difference; or None.
        difference: How far the run is from the replay after `Replayed.may_differ_at`, for intervals of other replays;
            None if nothing may differ, or for a strategy with a single scale, which says nothing of moving ones.
    """

    replayed: Replayed
    trained: Side
    agreement: float
    same_skips: bool
    parts_at: int | None
    parted_by: str | None
    difference: Tail | None

    def to_dict(self) -> dict[str, Any]:
        """The replay's prediction and how far it is right, as a dict for JSON."""
        return {
            **self.replayed.to_dict(),
            "agreement": self.agreement,
            "same_skips": self.same_skips,
            "trained_skips": self.trained.skips,
            "trained_mean_log2_scale": self.trained.mean_log2_scale,
            "trained_final_scale": self.trained.final_scale,
            "parts_at": self.parts_at,
            DIFFERENCE: None if self.difference is None else self.difference._asdict(),
        }

    def __str__(self) -> str:
        one, trained, scales = self.replayed, self.trained, self.trained.history.scales
        same = int((scales == one.scales).sum())
        skips = f": {trained.skips} skips, {one.skips} replayed"
        skips = f" at the same steps ({one.skips})" if self.same_skips else skips
        line = f"{one.strategy}: the same scale at {same:,} of {len(scales):,} steps "
        line += f"({self.agreement:.1%}), skips{skips}"
        if self.parts_at is None:
            return line
        (mean, final), (its_mean, its_final) = (cells(own, _SHOWN) for own in (trained, one))
        return (
            f"{line}\n  parts at step {self.parts_at}: {self.parted_by}\n  mean scale {mean}, {its_mean} replayed; "
            f"final scale {final}, {its_final} replayed"
        )


def validate(
    recording: Recording,
    run: pathlib.Path,
    strategies: Sequence[tuple[str, scaler.Strategy]],
    build_with: str | None = None,
    progress: Callable[[str, int, int], object] | None = None,
    differences: Sequence[Tail] = (),
) -> list[Validated]:
    """Trains with each strategy from the start of a recorded run, and compares with the replay step by step.

    Args:
        recording: The recording of the run, from its first step on.
        run: The run's folder. Nothing in it is written.
        strategies: Pairs of name and strategy.
        build_with: The argument of `halfstep explain --build`.
        progress: Called with a strategy's name, the number of steps taken, and their total.
        differences: Those of runs that are already validated, for the intervals of the replay.

    Raises:
        LoopError: If the trace does not begin with the run, or the run cannot be repeated.
        scaler.InvalidArgument: If the folder or the function does not exist.
    """
    numbers = recording.run.step
    if numbers[0] != 1 or (np.diff(numbers) != 1).any():
        raise LoopError(f"{recording.name}: it does not have every step from the run's first one on.")
    found = replay_recordings([recording], strategies, differences=differences)
    compared = []
    for (name, strategy), replayed in zip(strategies, found.strategies, strict=True):
        loop = again(run, build_with)
        change_strategy(loop, strategy)

        def report(done: int, name: str = name) -> None:
            if progress:
                progress(name, done, int(numbers[-1]))

        trained = train_again(loop, int(numbers[-1]), report)
        step: Any = loop.train_step  # `change_strategy` has checked that it has a loss scaler.
        compared.append(_compared(replayed, strategy, trained, float(step.loss_scaler.loss_scale), recording))
    return compared


def _compared(
    replayed: Replayed, strategy: scaler.Strategy, trained: History, final: float, recording: Recording
) -> Validated:
    # A window that the trace does not finish is in neither.
    if not np.array_equal(trained.step, recording.step):
        raise LoopError(
            f"{recording.name}: the trace attempted {len(recording.step)} steps, but the run that was built again "
            f"attempted {len(trained.step)}: it is not the run of this trace."
        )
    other = np.flatnonzero(trained.scales != replayed.scales)
    parts_at = int(recording.step[other[0]]) if len(other) else None
    return Validated(
        replayed,
        side_of(replayed.strategy, trained, final),
        agreement=float((trained.scales == replayed.scales).mean()),
        same_skips=bool(np.array_equal(trained.skipped, replayed.skipped)),
        parts_at=parts_at,
        parted_by=_why(replayed, trained, recording, int(other[0])) if len(other) else None,
        difference=difference(replayed, strategy, trained, final, recording.step),
    )


def difference(
    replayed: Replayed, strategy: scaler.Strategy, trained: History, final: float, step: np.ndarray
) -> Tail | None:
    """How far a real run is from its replay after the first skip that may differ from the recorded run's.

    Args:
        replayed: The replay of one recorded run.
        strategy: Its strategy.
        trained: The real run.
        final: Its scale after the last step.
        step: Int64 [steps], the steps' numbers.

    Returns:
        The difference; None if no skip may differ, or the strategy has a single scale: it is no guide to moving ones.
    """
    low, high = (float(bound) for bound in scaler.strategies.float_bounds_of(strategy))
    if replayed.may_differ_at is None or low >= high:
        return None
    since = int(np.searchsorted(step, replayed.may_differ_at)) + 1
    if since == len(step):
        return None
    ours = tail_of(replayed.scales, replayed.skipped, replayed.final_scale, (low, high), since)
    return ours.apart_from(tail_of(trained.scales, trained.skipped, final, (low, high), since))


def _why(replayed: Replayed, trained: History, recording: Recording, at: int) -> str:
    there = f"{trained.scales[at]:g} trained, {replayed.scales[at]:g} replayed"
    before = at - 1
    if before < 0:
        return there
    if trained.skipped[before] == replayed.skipped[before]:
        return f"{there}; step {recording.step[before]} had other gradients"
    did = "was skipped" if trained.skipped[before] else "was applied"
    predicted = "not to be" if trained.skipped[before] else "to be skipped"
    limit = f"the trace has a limit of {recording.limits.decided[before]:g}"
    return (
        f"{there}; step {recording.step[before]} {did} at {trained.scales[before]:g}, but the replay predicted it "
        f"{predicted}: {limit}"
    )
