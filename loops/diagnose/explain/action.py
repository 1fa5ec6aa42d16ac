"""Explains skipped steps while their run goes on, without any set-up.

Which steps of a visit were skipped, and why, as far as the step's outputs and its scalers tell.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import rich.console

import scaler
from loops.actions.progress import Progress
from loops.diagnose.explain.at_hand import Recent, explain_recent, scalers_in
from loops.diagnose.explain.explanation import Explanation
from loops.loop.kept_batches import HeldBatches
from loops.loop.visit import Visit
from loops.record.files import EXPLANATIONS, write_json
from loops.record.lines import StepLines
from loops.support.errors import NotWritable, check_count
from loops.support.json_values import read_object, without_nan
from loops.support.text import one_line
from loops.support.written import writing

if TYPE_CHECKING:
    from loops.loop.loop import Loop


class Explain:
    """Explains a skipped step at the visit behind it, as `loops.observe.explain` explains a step of a past run.

        loop = loops.Loop(train_step, dataset, actions=[loops.Progress(), loops.Explain()])

    It acts where no loss scale helps: a step was skipped because its loss, its backward pass or its update was not
    finite, or overflowed at a loss scale of 1 or less. The step is repeated in this process, on the batch that the loop
    still holds. The sentence is shown above the bar of `Progress`, or else on standard error; it is written into
    `explanations.json` next to the log of a `JsonLines` or `Csv`. A `scaler.StuckError` carries it, too, whatever the
    cause of the last skip. Then everything is put back, and the run goes on, or stops, as it would without this action,
    bit for bit.

    Until a step is skipped it costs nothing in the step: the loop holds the last batches of a call by reference, those
    of at most 128 MiB. In calls of many steps that takes about ten microseconds a step. An explanation takes the time
    of some dozens of steps and traces, the memory of all tensors of the step at once, and a copy of all variables on
    the host.

    A skipped step leaves the weights as they were. If later steps of the same call have moved them, the sentence says
    how many updates lie between. On several workers only the share of the batch that the first replica takes is looked
    at, up to its gradients, and the sentence says so.

    Args:
        most: The most steps that are explained in a run. Of the skips of one cause with the same variable only the
            first is. A step of your own that does not return `outcome.cause` and `outcome.variable` does not tell which
            skips these are: then each is looked at, counts here, and is told only if it began elsewhere than those
            before.
        seconds: After this time no further remedy is tried. What is needed to say where it began takes its time.

    Attributes:
        explanations: What was found, in order.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    chief_only = True

    def __init__(self, *, most: int = 5, seconds: float = 60.0):
        check_count(f"Explain(most={most!r})", most)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise scaler.InvalidArgument(f"Explain(seconds={seconds!r}): expected a number of at least 0.")
        self.explanations: list[Explanation] = []
        self._most, self._seconds = int(most), float(seconds)
        # By what makes skips or explanations alike, the step at which the first was seen.
        self._seen: dict[tuple, int] = {}
        self._tries: list[int] = []
        self._skipped = 0
        self._said_lost = False
        self._visit: Visit | None = None
        self._before: Visit | None = None
        self._told: dict[int, str] = {}

    def begin(self, loop: Loop) -> None:
        """Before the first step: finds the loop's bar and log."""
        self._loop = loop
        self._progress = next((action for action in loop.actions if isinstance(action, Progress)), None)
        self._file = Explanations.beside(loop.actions)
        # The micro-batches of a window, and one before them to compare with.
        self._held = HeldBatches(loop.element_spec, _window(loop) + 1)

    def __enter__(self) -> Explain:
        # Not in `begin`: a Checkpoint's `begin` may run later, and sets how many steps were taken.
        counters = self._loop.counters
        self._skipped, self._visit, self._before = counters.skipped, None, None
        # The run may have gone back: it forgets what was explained of later steps, whose batches may be left out now.
        self._tries = [tried for tried in self._tries if tried <= counters.data]
        self._seen = {alike: seen for alike, seen in self._seen.items() if seen <= counters.data}
        self.explanations = [one for one in self.explanations if one.step is None or one.step <= counters.data]
        if self._file:
            self._file.go_on(counters.data)
        if self._held.possible:
            self._loop.calls.hold_batches(self._held)
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.calls.hold_batches(None)

    def __call__(self, visit: Visit) -> None:
        """Explains what was skipped since the last visit, if it is the first of its kind."""
        self._before, self._visit = self._visit, visit
        self._told = {}
        skipped, self._skipped = visit.counters.skipped - self._skipped, visit.counters.skipped
        if not skipped or len(self._tries) >= self._most:
            return
        found = [one for one in skipped_steps(visit, scalers_in(self._loop)) if one.is_to_be_explained]
        held = [one for one in found if self._held.holds(one.step)]
        for one in held:
            if one.kind not in self._seen and len(self._tries) < self._most:
                text, is_new = self._explained(one)
                if is_new:
                    self._tell(text)
        lost = [one for one in found if one not in held and one.kind not in self._seen]
        if lost and not self._said_lost:
            self._said_lost = True
            self._tell(self._without_batch(lost[0]))

    def why_skipped(self) -> str | None:
        """Why a step of the last visit was skipped last; None if none was, or its batch is no longer held."""
        if self._visit is None:
            return None
        found = skipped_steps(self._visit, scalers_in(self._loop))
        last = max(found, key=lambda one: one.step, default=None)
        if last is None or not self._held.holds(last.step):
            return None
        return self._told.get(last.step) or self._explained(last)[0]

    def _tell(self, text: str) -> None:
        if self._progress is not None:
            self._progress.tell(text)
        else:
            rich.console.Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)

    def _explained(self, skip: SkippedStep) -> tuple[str, bool]:
        """Explains a step, and keeps what is new. Returns the sentence, and whether it is new."""
        self._tries.append(skip.step)
        found = None
        fault: tuple[object, ...]
        try:
            found = explain_recent(self._loop, self._recent(skip), self._seconds)
        except Exception as error:  # Of any kind: an explanation must not end a run that would go on.
            why = one_line(error)
            text, fault = f"Step {skip.step} was skipped, and could not be explained: {why}", (why,)
        else:
            # What makes two explanations alike: where the step failed, and with what.
            place = (found.where, found.layer, found.inside, found.regularizer, found.custom_gradient, found.columns)
            fault = (found.verdict, found.empty, *place, found.operation, found.line, found.kind)
            text = found.sentence
        is_new = fault not in self._seen
        # A step that passes now may have failed with the weights before: the next of its kind may tell.
        if found is None or found.verdict != "healthy":
            for alike in (fault, *([skip.kind] if skip.kind else [])):
                self._seen.setdefault(alike, skip.step)
        if is_new and found is not None:
            self.explanations.append(found)
        if is_new and self._file:
            values = {"step": skip.step} if found is None else found.to_dict()
            try:
                self._file.add({**values, "sentence": text})
            except NotWritable as error:
                text = f"{text} {error}"
        self._told[skip.step] = text
        return text, is_new

    def _recent(self, skip: SkippedStep) -> Recent:
        following, previous = self._held.get(skip.step + 1), self._held.get(skip.step - _window(self._loop))
        before = [self._held.get(skip.step - back) for back in range(_window(self._loop) - 1, 0, -1)]
        rows = [row for visit in (self._before, self._visit) if visit is not None for row in _rows(visit)]
        logged = next((row for row in rows if row["step"] == skip.step), None)
        return Recent(
            skip.step,
            self._held.get(skip.step),
            skip.scales,
            {**(logged or {"step": skip.step}), "applied": False},
            skip.updates,
            [row for row in rows if row["step"] < skip.step],
            [one for one in before if one is not None],
            previous if following is None else following,
            "previous" if following is None else "next",
        )

    def _without_batch(self, skip: SkippedStep) -> str:
        why = "it is not made of tensors alone" if not self._held.possible else "later steps of its call have followed"
        return (
            f"Step {skip.step} was skipped ({skip.cause.name}). Its batch is no longer held, since {why}: "
            f"`halfstep explain --step {skip.step}` repeats it from a checkpoint."
        )


def _window(loop: Loop) -> int:
    return getattr(loop.train_step, "accumulate", 1)


def _rows(visit: Visit) -> list[Mapping[str, Any]]:
    """The outputs of its steps as rows of a log."""
    columns = {name: without_nan(np.asarray(values).tolist()) for name, values in visit.outputs.items()}
    steps = range(visit.first, visit.counters.data + 1)
    return [{"step": step, **{name: column[row] for name, column in columns.items()}} for row, step in enumerate(steps)]


_NOT_OF_THE_SCALE = (scaler.Cause.LOSS, scaler.Cause.BACKWARD, scaler.Cause.TOO_LARGE, scaler.Cause.UPDATE)
"""The causes that no loss scale cures. An OVERFLOW is how a scale finds its level."""


class SkippedStep(NamedTuple):
    """A step that was skipped.

    Attributes:
        step: Its number, from 1.
        cause: Why; OVERFLOW if nothing says more.
        variable: The position of the variable to look at first; -1 if it is unknown.
        updates: How many updates the weights had since; None if that is unknown.
        scales: The loss scale that it had, for each scaler for which it is known.
        is_told: Whether the step's outputs or its scaler say the cause and the variable.
    """

    step: int
    cause: scaler.Cause
    variable: int
    updates: int | None
    scales: tuple[tuple[scaler.LossScaler, float], ...]
    is_told: bool

    @property
    def kind(self) -> tuple[scaler.Cause, int] | None:
        """What makes two skips alike: their cause, and the variable, which belongs to a layer. None if it is unknown.

        Without these outputs only the last skip of a call is known by its scaler: the same fault earlier in a call
        would seem to be another one.
        """
        return (self.cause, self.variable) if self.is_told else None

    @property
    def is_to_be_explained(self) -> bool:
        """Whether no loss scale cures its cause.

        Steps that accumulate, that XLA compiles or that select new values only presume an OVERFLOW. At a scale of 1 or
        less it cannot be the scale's.
        """
        scales = [loss_scale for _, loss_scale in self.scales]
        at_most_one = bool(scales) and max(scales) <= 1.0
        return self.cause in _NOT_OF_THE_SCALE or (self.cause is scaler.Cause.OVERFLOW and at_most_one)


def skipped_steps(visit: Visit, scalers: Sequence[scaler.LossScaler]) -> list[SkippedStep]:
    """The skipped steps of a visit: those with the fewest updates since come first, and of these the earliest.

    A step that returns no `applied` is only known to be skipped if it is the last.

    Args:
        visit: The visit, of which the counters say that some step was skipped.
        scalers: The loss scalers of the step.
    """
    count = visit.counters.data - visit.first + 1
    attempted = visit.outputs.get("attempted", np.ones(count, bool)).astype(bool)
    decided = np.flatnonzero(attempted)
    if not len(decided):
        return []
    # Only the last decision is known to be a scaler's last skip.
    stuck = [one for one in scalers if int(one.counters.consecutive_skips)]
    applied = visit.outputs.get("applied")
    if applied is None:
        rows = [int(decided[-1])] if stuck else []
    else:
        rows = np.flatnonzero(attempted & ~applied.astype(bool)).tolist()
    found = [_step(visit, row, stuck if row == decided[-1] else [], scalers) for row in rows]
    return sorted(found, key=lambda one: (one.updates is None, one.updates, one.step))


def _step(
    visit: Visit, row: int, stuck: Sequence[scaler.LossScaler], scalers: Sequence[scaler.LossScaler]
) -> SkippedStep:
    outputs, last = visit.outputs, [one.last_skip for one in stuck]
    scales = [(one, float(skip.loss_scale)) for one, skip in zip(stuck, last, strict=True)]
    if not stuck and "loss_scale" in outputs and len(scalers) == 1:
        scales = [(scalers[0], float(outputs["loss_scale"][row]))]
    whole = {name: column for name, column in outputs.items() if column.dtype.kind in "iu"}
    known = [int(whole["cause"][row])] if "cause" in whole else [int(skip.cause) for skip in last]
    causes = [scaler.Cause(one) for one in known if one in [*scaler.Cause] and one != scaler.Cause.NONE]
    if not causes:
        lost = "loss" in outputs and not np.isfinite(outputs["loss"][row])
        causes = [scaler.Cause.LOSS if lost else scaler.Cause.OVERFLOW]
    variable = int(last[0].variable) if last else -1
    # How many steps moved weights since: the step itself is one of them if another of its parts moved.
    moved = [column for name, column in outputs.items() if name.rpartition("/")[2] == "applied"]
    unknown = 0 if stuck else None
    return SkippedStep(
        visit.first + row,
        causes[0],
        int(whole["variable"][row]) if "variable" in whole else variable,
        int(np.any(moved, axis=0)[row:].sum()) if "applied" in outputs else unknown,
        tuple(scales),
        bool(last) or {"cause", "variable"} <= set(whole),
    )


class Explanations:
    """The file `explanations.json`: `{"explanations": [{"step": 3, "sentence": "...", ...}, ...]}`.

    Args:
        path: The file.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._found: list[dict[str, Any]] = []

    @classmethod
    def beside(cls, actions: Iterable[Any]) -> Explanations | None:
        """The file next to the log that one of these actions writes; None if none writes one."""
        paths = [action.path for action in actions if isinstance(action, StepLines)]
        return cls(paths[0].absolute().parent / EXPLANATIONS) if paths else None

    def go_on(self, step: int) -> None:
        """Keeps the explanations of steps up to this one, and removes the file if there are none.

        Raises:
            NotWritable: If the file cannot be written or removed.
        """
        found = self._found or _read(self._path)
        self._found = [one for one in found if one["step"] <= step]
        if self._found:
            write_json(self._path, {"explanations": self._found})
        else:
            with writing("Explain", self._path):
                self._path.unlink(missing_ok=True)

    def add(self, explanation: dict[str, Any]) -> None:
        """Adds an explanation.

        Raises:
            NotWritable: If the file cannot be written.
        """
        self._found.append(explanation)
        write_json(self._path, {"explanations": self._found})


def _read(path: pathlib.Path) -> list[dict[str, Any]]:
    try:
        found = read_object(path.read_text(encoding="utf-8")).get("explanations")
    except (OSError, ValueError):
        return []
    rows = found if isinstance(found, list) else []
    return [one for one in rows if isinstance(one, dict) and isinstance(one.get("step"), int)]
