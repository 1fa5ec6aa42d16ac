"""Trains with other strategies on the data of a recorded run: this shows more than a trace can.

`live` repeats a part of the run, and compares with it. `validate` repeats it from its first step, and compares with the
replay's prediction.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import scaler
from loops.actions.checkpoint import Checkpoint
from loops.loop.loop import Loop
from loops.loop.state import folder
from loops.record.reading import read_steps
from loops.record.steps import Steps
from loops.replay.intervals import DIFFERENCE, Tail, tail_of
from loops.replay.recording import Recording
from loops.replay.replay import replay_recordings
from loops.replay.results import Course, Replayed, Tabled, cells, figures_of
from loops.run.rewind.rewind import log_of, open_run, rewind
from loops.step.train_step import TrainStep
from loops.support.errors import LoopError, OutOfData
from loops.support.signals import deferred_signals
from loops.support.text import columns

_SHOWN = ("skips", "mean_log2_scale", "final_scale")


@dataclasses.dataclass(frozen=True)
class Side(Course):
    """A run as it was recorded or trained.

    Attributes:
        loss: The mean loss of the last tenth of the steps; NaN if one of them is not finite.
        history: Every step.
    """

    loss: float
    history: History = dataclasses.field(repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Live(Tabled):
    """A run from a checkpoint on, as recorded and with other strategies.

    Attributes:
        began_at: The step of the checkpoint.
        steps: The number of attempted steps after it.
        differs: Why the run could not be reproduced, so that more than the strategy differs; or None.
        recorded: The run as recorded.
        strategies: The run with each strategy.
    """

    began_at: int
    steps: int
    differs: str | None
    recorded: Side
    strategies: tuple[Side, ...]

    def text(self, width: int | None = None) -> str:
        """A table, if possible no wider than `width` characters."""
        rows: list[tuple[str, ...]] = [(f"from step {self.began_at + 1}", "skips", "mean scale", "last scale", "loss")]
        shown = [("as it was", self.recorded), *((side.strategy, side) for side in self.strategies)]
        rows += [(name, *cells(side, _SHOWN), f"{side.loss:.5g}") for name, side in shown]
        return "\n".join([columns(rows, width), *([f"not the strategy alone: {self.differs}"] if self.differs else [])])


def live(
    run: pathlib.Path,
    strategies: Sequence[tuple[str, scaler.Strategy]],
    step: int | None = None,
    build_with: str | None = None,
    progress: Callable[[str], object] = lambda text: None,
) -> Live:
    """Repeats a run from the checkpoint nearest to a step up to its last step, once with each strategy.

    Each strategy begins at its initial scale, as in a new run.

    Args:
        run: The run's folder. Nothing in it is written.
        strategies: Pairs of name and strategy.
        step: The step to begin near; by default the run's first.
        build_with: The argument of `halfstep explain --build`.
        progress: Called now and then with a text that says what is being done.

    Raises:
        LoopError: If the run has no checkpoint before its last step, or cannot be repeated.
        scaler.InvalidArgument: If the folder, the function or the step does not exist.
    """
    loop = open_run(run, build_with)
    log = read_steps(None, log_of(loop, run))
    if not len(log):
        raise LoopError(f"{run}: it has no log of its steps to compare with: an hs.JsonLines writes one.")
    last = int(log.step[-1])
    if step is not None and not 1 <= step <= last:
        raise scaler.InvalidArgument(f"step {step}: the run's log ends at step {last}: expected one from 1 to {last}.")
    window = getattr(loop.train_step, "accumulate", 1)
    began_at = _nearest(loop, run, 1 if step is None else step, last - window)
    moment = rewind(
        loop,
        last,
        run=run,
        at_least=last - window - began_at,
        progress=lambda done, of: progress(f"the run as it was: {done:,} of {of:,}"),
    )
    sides = []
    for number, (name, strategy) in enumerate(strategies):
        progress(f"{name}: {number:,} of {len(strategies):,}")
        outputs = moment.from_checkpoint(functools.partial(_changed, strategy=strategy))
        stacked = {name: np.array([one[name] for one in outputs]) for name in outputs[0]}
        taken = history_of(stacked, moment.began_at + 1)
        sides.append(side_of(name, taken, float(taken.scales[-1])))
    step_of_run: Any = loop.train_step  # `change_strategy` has checked that it has a loss scaler.
    own = scaler.strategies.in_words(step_of_run.loss_scaler.strategy)
    recorded = _recorded(log, moment.began_at, last)
    own_side = side_of(own, recorded, float(recorded.scales[-1]))
    return Live(moment.began_at, len(recorded.step), moment.differs, own_side, tuple(sides))


def _nearest(loop: Loop, run: pathlib.Path, step: int, limit: int) -> int:
    saves = next(action for action in loop.actions if isinstance(action, Checkpoint))
    numbers = [number for number in folder.numbers(saves.place) if number <= limit]
    if not numbers:
        raise LoopError(
            f"{run}: it has no checkpoint before its last step, to begin at. Train with checkpoints: halfstep train "
            "--checkpoint-every N, or hs.Checkpoint in a program."
        )
    return min(numbers, key=lambda number: (abs(number - step), number))


def _changed(loop: Loop, strategy: scaler.Strategy) -> Callable[[], object]:
    step, before = loop.train_step, getattr(loop.train_step, "loss_scaler", None)
    change_strategy(loop, strategy)
    return lambda: setattr(step, "loss_scaler", before)


def _recorded(log: Steps, began_at: int, last: int) -> History:
    kept = log.where((log.step > began_at) & (log.step <= last))
    missing = [name for name in ("loss_scale", "applied") if np.isnan(kept.column(name)).any()]
    if missing or len(kept) != last - began_at:
        raise LoopError(
            f"the run's log lacks {missing[0] if missing else 'some steps'} after step {began_at}: an hs.JsonLines "
            "of each step writes it."
        )
    return history_of({**{name: kept.column(name) for name in _NAMES}, "attempted": kept.attempted}, began_at + 1)


def side_of(strategy: str, taken: History, final: float) -> Side:
    """The figures of some steps.

    Args:
        strategy: Its name.
        taken: The steps.
        final: The last scale.
    """
    loss = float(taken.loss[-max(1, len(taken.step) // 10) :].mean())
    return Side(strategy, **figures_of(taken.scales, taken.skipped, final), loss=loss, history=taken)


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


def change_strategy(loop: Loop, strategy: scaler.Strategy) -> None:
    """Makes the loop's step scale with another strategy, from its initial state.

    Raises:
        LoopError: If the step is not a `TrainStep`, which has one loss scaler.
    """
    step = loop.train_step
    if not isinstance(step, TrainStep) or step.layerwise is not None:
        raise LoopError(
            "cannot change the strategy of this run: its train step is not an hs.TrainStep with a single loss scale."
        )
    step.loss_scaler = scaler.LossScaler(strategy)


def train_again(loop: Loop, steps: int, progress: Callable[[int, int], object] = lambda done, of: None) -> History:
    """Takes steps without calling any action.

    Args:
        loop: A loop before its first step.
        steps: The number of batches to take.
        progress: Called with the number of batches taken and `steps`, after each call.

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
            progress(done + taken, steps)
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
            **{f"trained_{name}": getattr(self.trained, name) for name in _SHOWN},
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
        (mean, final), (its_mean, its_final) = (cells(own, _SHOWN[1:]) for own in (trained, one))
        return (
            f"{line}\n  parts at step {self.parts_at}: {self.parted_by}\n  mean scale {mean}, {its_mean} replayed; "
            f"final scale {final}, {its_final} replayed"
        )


def validate(
    recording: Recording,
    run: pathlib.Path,
    strategies: Sequence[tuple[str, scaler.Strategy]],
    build_with: str | None = None,
    progress: Callable[[str], object] = lambda text: None,
    differences: Sequence[Tail] = (),
) -> list[Validated]:
    """Trains with each strategy from the start of a recorded run, and compares with the replay step by step.

    Args:
        recording: The recording of the run, from its first step on.
        run: The run's folder. Nothing in it is written.
        strategies: Pairs of name and strategy.
        build_with: The argument of `halfstep explain --build`.
        progress: Called now and then with a text that says what is being done.
        differences: Those of runs that are already validated, for the intervals of the replay.

    Raises:
        LoopError: If the trace does not begin with the run, or the run cannot be repeated.
        scaler.InvalidArgument: If the folder or the function does not exist.
    """
    if run.is_file():
        raise scaler.InvalidArgument(
            f"{run}: a trace alone is not enough to train again: expected the folder of its run, the --out of halfstep "
            "train, or that of a program and --build."
        )
    numbers = recording.run.step
    if numbers[0] != 1 or (np.diff(numbers) != 1).any():
        raise LoopError(f"{recording.name}: it does not have every step from the run's first one on.")
    found = replay_recordings([recording], strategies, differences=differences)
    compared = []
    for (name, strategy), replayed in zip(strategies, found.strategies, strict=True):
        loop = open_run(run, build_with)
        change_strategy(loop, strategy)

        def report(done: int, of: int, name: str = name) -> None:
            progress(f"trained {done:,} of {of:,} steps with {name}")

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
