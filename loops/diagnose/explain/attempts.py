"""Repeats one step with a change, and restores everything afterwards.

How a step is traced for an attempt: as it is written, its inner functions inline, its arithmetic in order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import scaler
from loops.backend.variables import components
from loops.diagnose.graph.calls import ScalerCalls, recording_scaler_calls
from loops.diagnose.graph.changes import windows_of, without_windows
from loops.diagnose.graph.models import models_in_step, owned_by_parts, paths_of, weights_in_step
from loops.loop.loop import Loop
from loops.loop.state.variables import variable_groups
from loops.loop.user_step import taking_batches
from loops.run.rewind.rewind import rewind
from loops.step.parts import OwnStep
from loops.step.train_step import TrainStep
from loops.step.user_steps import find


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The result of one attempt at a step.

    Attributes:
        finite: Whether the gradients passed the check, and the loss was finite too.
        applied: Whether the gradients passed the check, whatever the loss was.
        loss: The loss, or NaN if the step returns none.
        outputs: The outputs of the step, as NumPy values.
        at_scale: The lower loss scale at which the step was finite, if it was not at its own; else None.
        decided: For each `apply` that can be seen its scaler, and whether its gradients were finite.
        nonzero: The number of values of each gradient that were not zero; infinities and NaN count. None if unknown.
        moved: The norm of the update over that of the weights before it. None without an update, or if unknown.
    """

    finite: bool
    applied: bool
    loss: float
    outputs: dict[str, Any]
    at_scale: float | None = None
    decided: Sequence[tuple[scaler.LossScaler, bool]] = ()
    nonzero: np.ndarray | None = None
    moved: float | None = None

    @property
    def reports_cause(self) -> bool:
        """Whether its output `cause` says why it was skipped. That of several scalers may be one that was applied."""
        return int(self.outputs.get("cause", scaler.Cause.NONE)) != scaler.Cause.NONE

    @property
    def cause(self) -> scaler.Cause:
        """Why the step was skipped: its output `cause`, or, for a step without that output, judging by its loss.

        It is also LOSS if the step was applied although its loss is not finite.
        """
        if self.applied:
            return scaler.Cause.NONE if self.finite else scaler.Cause.LOSS
        if self.reports_cause:
            return scaler.Cause(int(self.outputs["cause"]))
        return scaler.Cause.LOSS if "loss" in self.outputs and not math.isfinite(self.loss) else scaler.Cause.OVERFLOW


class Attempts:
    """Repeats the step that follows a `ReplayPoint`.

    Args:
        moment: The run just before the step, from `rewind` or `at_hand`.
        progress: Called before each attempt.
        in_time: Whether there is time for more than is needed to say where the failure began.

    Attributes:
        moment: The run just before the step.
        in_time: The argument.
        layers: The layers of the step's models, by path.
        scalers: The loss scalers that the step uses.
        moves: Whether an attempt includes the update; needed if the gradients are finite and the update is not.
        lower_from: The step's own loss scale, if a change that makes the loss finite may need a lower one; else None.
        scanned_at: The factor on the loss in a scan of the step; None for no change.
        step: The step as a Python function of a batch, without `tf.function`, which would reuse its first trace.
        literal: Whether TensorFlow must not regroup the step's arithmetic: in one graph and not in another, it moves a
            small factor past a product that overflows.
        windowed: Whether the step is a micro-batch of a window.
        part: The part of a `ComposedStep` that failed, whose loss is that of an attempt; None without parts.
        own_variables: Floating-point variables of the step that belong to no model, optimizer or scaler.
    """

    def __init__(
        self,
        moment: Any,
        progress: Callable[[], object] = lambda: None,
        in_time: Callable[[], bool] = lambda: True,
    ):
        self.moment, self.in_time = moment, in_time
        self.moves = False
        self.lower_from: float | None = None
        self.scanned_at: float | None = None
        self.literal = False
        self.part: str | None = None
        self.progress = progress
        written = moment.train_step
        while hasattr(written, "python_function"):
            written = written.python_function
        ours = written is moment.train_step
        self.step = moment.take if ours else taking_batches(written, moment.loop.element_spec)
        self.layers = paths_of(models_in_step(moment.train_step))
        self.windowed = bool(windows_of(moment.train_step))
        self._factor = tf.Variable(1.0, trainable=False)
        self._unchanged: tuple[Any, Callable] | None = None
        concrete = moment.loop.calls.trace()
        own = getattr(moment.train_step, "loss_scaler", None)
        found = list(find(concrete).scalers)
        self.scalers: list[scaler.LossScaler] = found or ([own] if own is not None else [])
        owned = owned_by_parts(moment.train_step)
        self.own_variables = [
            one
            for one in variable_groups(moment.train_step, concrete).get("step", [])
            if one.dtype.is_floating and id(one) not in owned and scaler.authoring.owner_of(one) is None
        ]
        self._inlines, counts = self._first_look()
        # Created here, since variables cannot be created while a graph is traced.
        self._nonzero = [tf.Variable(tf.zeros([count]), False) for count in counts]

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of `to_blame`, or None without a scaler."""
        return None if self.to_blame is None else float(self.to_blame.loss_scale)

    @property
    def to_blame(self) -> scaler.LossScaler | None:
        """Of several scalers of a step the one whose gradients are not finite, else the first; None without a scaler.

        A `PerLoss` also looks at the sum of all gradients, which has no scale: that of a loss comes first.
        """
        return next(iter((*self.guilty, *self.scalers)), None)

    @functools.cached_property
    def guilty(self) -> tuple[scaler.LossScaler, ...]:
        """Of several scalers of a step all those whose gradients are not finite, the one to blame first."""
        if len(self.scalers) < 2:
            return ()
        found = dict.fromkeys(one for one, finite in self.take_at(1.0).decided if not finite)
        return tuple(one for one in found if float(one.loss_scale) != 1.0) or tuple(found)

    def _first_look(self) -> tuple[bool, list[int]]:
        """Traces the step once.

        Returns:
            Whether inner `tf.function`s can be traced inline, and the number of gradients in each call of a scaler.
        """
        if isinstance(self.moment.train_step, TrainStep):
            return False, [len(self.moment.train_step.model.trainable_variables)]
        # AutoGraph does not convert the `if` and `while` of a `tf.function` that is traced inline.
        refused = contextlib.suppress(tf.errors.OperatorNotAllowedInGraphError)
        for inlines in (True, False):
            place = inlined() if inlines else contextlib.nullcontext()
            recording = recording_scaler_calls(self.scalers, moves=not self.moment.alone)
            with refused, self.as_it_was(), recording as calls, place:
                tf.function(self.step).get_concrete_function(self.moment.batch)
                break
        return inlines, [len(grads) for grads in calls.gradients]

    def as_run(self, batch: Any = None) -> Attempt:
        """Repeats the step as the run takes it, with its update unless other workers would have to take part.

        Args:
            batch: A batch to use instead of the step's own.
        """
        batch = self.moment.batch if batch is None else batch
        if not self.literal and not self.windowed and not self.moment.alone:
            self.progress()
            with self.as_it_was():
                outputs = self.moment.loop.calls.one(batch)
            if "applied" in outputs and "loss" in outputs:
                return self._attempt(outputs, [])
        with self.as_it_was(), recording_scaler_calls(self.scalers, moves=not self.moment.alone) as calls:
            return self._taken(self._traced(calls, batch), batch)

    def depends_on_graph(self, attempt: Attempt) -> bool:
        """Whether loss and gradients, which were not finite in the run's graph, are finite in a graph without update.

        Args:
            attempt: The attempt in the run's graph, from `as_run`.
        """
        of_update = (scaler.Cause.NONE, scaler.Cause.TOO_LARGE, scaler.Cause.UPDATE)
        return attempt.reports_cause and attempt.cause not in of_update and self.take_at(1.0).finite

    def take(self, change: Any = None, batch: Any = None) -> Attempt:
        """Repeats the step up to its gradients, with a change.

        Args:
            change: A context manager that changes something and restores it; None for no change.
            batch: A batch to use instead of the step's own.
        """
        with self._traced_with(change, batch, moves=self.moves) as taken:
            before = held(weights_in_step(self.moment.train_step, self.part)) if self.moves else None
            attempt = taken(1.0)
            if before is not None:
                attempt = dataclasses.replace(attempt, moved=size_of_update(before))
            # A custom step may return no loss.
            lost = "loss" in attempt.outputs and not math.isfinite(attempt.loss)
            if attempt.finite or self.lower_from is None or lost:
                return attempt
            self.moment.reset()
            lower = taken(1.0 / self.lower_from)
        return dataclasses.replace(lower, at_scale=1.0) if lower.finite else attempt

    def take_at(self, factor: float, batch: Any = None) -> Attempt:
        """Repeats the step up to its gradients, with its loss scale multiplied by a factor.

        Args:
            factor: The factor on the loss scale.
            batch: A batch to use instead of the step's own.
        """
        with self._traced_with(None, batch, moves=False) as taken:
            return taken(factor)

    @contextlib.contextmanager
    def _traced_with(self, change: Any, batch: Any, *, moves: bool) -> Iterator[Callable[[float], Attempt]]:
        """Inside, a function repeats the changed step with its loss scale multiplied by a factor."""
        batch = self.moment.batch if batch is None else batch
        recording = recording_scaler_calls(self.scalers, self._factor, moves=moves, nonzero=self._nonzero)
        with self.as_it_was(), change or contextlib.nullcontext(), recording as calls:
            # Unchanged, and up to its gradients, it is traced once for all batches of these shapes.
            shapes = None if change or moves else tf.nest.map_structure(tf.type_spec_from_value, batch)
            if shapes is None or self._unchanged is None or self._unchanged[0] != shapes:
                step = self._traced(calls, batch)
                self._unchanged = self._unchanged if shapes is None else (shapes, step)
            else:
                step = self._unchanged[1]

            def taken(factor: float) -> Attempt:
                self._factor.assign(factor)
                return self._taken(step, batch)

            yield taken

    def _taken(self, step: Callable, batch: Any) -> Attempt:
        self.progress()
        for one in self._nonzero:
            one.assign(tf.zeros_like(one))
        before = [int(one.counters.applied) for one in self.scalers]
        returned, finite, losses, owners = step(batch)
        after = [int(one.counters.applied) for one in self.scalers]
        decided = [(owner, bool(one)) for owner, one in zip(owners, finite, strict=True)]
        known = [one for _, one in decided] or [then < now for then, now in zip(before, after, strict=True)]
        outputs = {name: value.numpy() for name, value in returned.items()}
        nonzero = np.concatenate([one.numpy() for one in self._nonzero]) if self._nonzero else None
        return dataclasses.replace(self._attempt(outputs, known, losses), decided=decided, nonzero=nonzero)

    def _attempt(self, outputs: dict, known: Sequence[bool], losses: Sequence[tf.Tensor] = ()) -> Attempt:
        applied = bool(outputs["applied"]) if "applied" in outputs else all(known)
        # `losses` covers a step that returns no loss, or returns it under another name.
        seen = all(map(bool, losses)) and bool(np.isfinite(outputs.get("loss", 0.0)))
        return Attempt(applied and seen, applied, float(outputs.get(loss_name(self.part), math.nan)), outputs)

    def _traced(self, calls: ScalerCalls, batch: Any) -> Callable:
        owners: list[scaler.LossScaler] = []

        def taken(batch: Any) -> tuple[Any, list, list]:
            outputs = self.take_inlined(batch)
            # What an inner function decided cannot be read; of a step that says whether it was applied it need not be.
            here = tf.compat.v1.get_default_graph()
            decided = list(zip(calls.owners, calls.finite, strict=True))
            decided = [pair for pair in decided if "applied" not in outputs or pair[1].graph is here]
            owners[:] = [owner for owner, _ in decided]
            return outputs, [finite for _, finite in decided], calls.losses_finite()

        step = tf.function(taken, jit_compile=self.moment.jit_compile or None).get_concrete_function(batch)
        return lambda batch: (*step(batch), owners)

    def take_inlined(self, batch: Any) -> Any:
        """Runs the step in the graph that is being traced, with inner `tf.function`s inline if possible."""
        with inlined() if self._inlines else contextlib.nullcontext():
            return self.step(batch)

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Resets the run to the state before the step, now and at the end. Inside, a micro-batch is a whole step."""
        step = self.moment.train_step
        self.moment.reset()
        try:
            # What a step of this package would keep is traced again: what XLA compiled, and whose turn it is.
            again = step.retraced() if isinstance(step, OwnStep) else contextlib.nullcontext()
            with again, without_windows(step), not_regrouped() if self.literal else contextlib.nullcontext():
                yield
        finally:
            self.moment.reset()

    @contextlib.contextmanager
    def scanning(self) -> Iterator[None]:
        """The same for a step of which XLA compiles nothing."""
        step = self.moment.train_step
        with (
            self.as_it_was(),
            step.retraced(jit_compile=False) if isinstance(step, TrainStep) else contextlib.nullcontext(),
        ):
            yield


def loss_name(part: str | None) -> str:
    """Under which name a step returns its loss, or that of one of its parts."""
    return f"{part}/loss" if part else "loss"


Progress = Callable[[str], object]


def attempts_at(
    loop: Loop, step: int, run: str | os.PathLike | None, progress: Progress, at_least: int = 0
) -> Attempts:
    """The attempts at a past step of a run.

    Args:
        loop: The loop of the run, before its first step.
        step: The number of the step, from 1.
        run: The folder with the log `steps.jsonl`, if the loop has no `JsonLines`.
        progress: Called now and then with a text that says what is done.
        at_least: So many steps before it are repeated, too.
    """
    taken = itertools.count(1)
    moment = rewind(
        loop,
        step,
        run=None if run is None else pathlib.Path(run),
        at_least=at_least,
        progress=lambda done, total: progress(f"replayed {done} of {total} steps"),
    )
    return Attempts(moment, lambda: progress(f"ran the step {next(taken)} times"))


@contextlib.contextmanager
def inlined() -> Iterator[None]:
    """Traces inner `tf.function`s inline, as a part of their caller's graph."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


@contextlib.contextmanager
def not_regrouped() -> Iterator[None]:
    """Prevents TensorFlow from reordering arithmetic."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    try:
        yield
    finally:
        # None is the default. Another value would make TensorFlow prepare each compiled function again.
        own = before.get("arithmetic_optimization")
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": own})


Held = list[tuple[tf.Variable, np.ndarray]]
"""Variables and copies of their values, float64."""


def held(variables: Iterable[Any]) -> Held:
    """Copies the values of floating-point variables; on several replicas those of the first."""
    return [(own, _value(own)) for own in (components(one)[0] for one in variables)]


def size_of_update(before: Held) -> float | None:
    """The norm of what has changed since, over the norm of the values then: infinity if it is not finite.

    Returns:
        None if the variables were all zero, or are none.
    """
    then, now = _norm(value for _, value in before), _norm(_value(own) - value for own, value in before)
    if not then > 0.0:
        return None
    return now / then if math.isfinite(now) else math.inf


def _value(variable: tf.Variable) -> np.ndarray:
    return np.array(variable.numpy()).astype(np.float64)


def _norm(values: Iterable[np.ndarray]) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        return math.sqrt(sum(float(np.sum(np.square(one))) for one in values))
