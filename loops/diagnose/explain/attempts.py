"""Taking one step again with something changed, and everything put back."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.graph.changes import with_value
from loops.diagnose.graph.listening import Heard, listening
from loops.diagnose.graph.models import owned_by_parts
from loops.loop.signature import taking_batches
from loops.loop.state.variables import variable_groups
from loops.step.scalers_in_graph import find
from loops.step.train_step import TrainStep


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What a step did.

    Attributes:
        finite: Whether it was applied or would have been, and its loss was finite, too.
        applied: Whether it was applied or would have been, whatever its loss.
        loss: The loss, NaN where the step returns none.
        outputs: All that it returned, as numbers.
        at_scale: The lower loss scale at which it was finite, where it was not at the step's own.
        nonzero: For each gradient, how many of its values were not zero, or not finite; None where nobody counted.
    """

    finite: bool
    applied: bool
    loss: float
    outputs: dict[str, Any]
    at_scale: float | None = None
    nonzero: np.ndarray | None = None

    @property
    def cause(self) -> scaler.Cause:
        """Why it was skipped, as the step says; of a step that does not say it, as its loss shows.

        It is LOSS, too, where the step was applied though its loss is not finite.
        """
        if self.applied:
            return scaler.Cause.NONE if self.finite else scaler.Cause.LOSS
        if "cause" in self.outputs:
            return scaler.Cause(int(self.outputs["cause"]))
        return scaler.Cause.LOSS if "loss" in self.outputs and not math.isfinite(self.loss) else scaler.Cause.OVERFLOW


class Attempts:
    """Takes the step that a `ReplayPoint` stands before.

    Attributes:
        moment: The moment.
        scalers: The loss scalers that the step moves.
        moves: Whether it takes the update to see what helps: where the gradients are finite before it.
        lower_from: The step's loss scale, where a change that makes the loss finite may need a lower one; else None.
        scanned_at: What multiplies the loss where the step is measured, None for nothing.
        step: The step, a function of a batch, with no `tf.function` around it, which would keep its first trace.
        literal: Whether TensorFlow must not regroup the step's arithmetic: it moves a small factor past a product that
            overflows, in one graph and not in another.
        windowed: Whether the step is a micro-batch of a window.
        own_variables: Floating-point variables of the step that belong to no model, optimizer or scaler.
    """

    def __init__(self, moment: Any, progress: Callable[[], None] = lambda: None):
        self.moment = moment
        self.moves = False
        self.lower_from: float | None = None
        self.scanned_at: float | None = None
        self.literal = False
        self._progress = progress
        self.step = as_python(moment)
        self.windowed = isinstance(moment.train_step, TrainStep) and moment.train_step.window is not None
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
            if one.dtype.is_floating and id(one) not in owned and scaler.LossScaler.owner_of(one) is None
        ]
        self._inlines, counts = self._first_look()
        # What is counted; a graph that is being traced can make no variables.
        self._nonzero = [tf.Variable(tf.zeros([count]), False) for count in counts]

    @property
    def loss_scale(self) -> float | None:
        """The step's, of the first scaler, or None."""
        return float(self.scalers[0].loss_scale) if self.scalers else None

    def _first_look(self) -> tuple[bool, list[int]]:
        """Whether functions of the step that were compiled by themselves can be traced as a part of it.

        Returns:
            That, and how many gradients are handed over at each time.
        """
        if isinstance(self.moment.train_step, TrainStep):
            return False, [len(self.moment.train_step.model.trainable_variables)]
        # Nothing rewrites the `if` and `while` of a function that is not compiled by itself.
        refused = contextlib.suppress(tf.errors.OperatorNotAllowedInGraphError)
        for inlines in (True, False):
            place = inlined() if inlines else contextlib.nullcontext()
            with refused, self.as_it_was(), listening(self.scalers) as heard, place:
                tf.function(self.step).get_concrete_function(self.moment.batch)
                break
        return inlines, [len(grads) for grads in heard.gradients]

    def as_run(self, batch: Any = None) -> Attempt:
        """Takes the step as the run does, with its update.

        Args:
            batch: In the place of the step's own.
        """
        batch = self.moment.batch if batch is None else batch
        if not self.literal and not self.windowed:
            self._progress()
            with self.as_it_was():
                outputs = self.moment.loop.calls.one(batch)
            if "applied" in outputs and "loss" in outputs:
                return _attempt(outputs, [])
        with self.as_it_was(), listening(self.scalers) as heard:
            return self._taken(self._traced(heard, batch), batch)

    def is_another(self, attempt: Attempt) -> bool:
        """Whether the step is finite up to its gradients though, as the run took it, these or its loss were not.

        Args:
            attempt: As the run took it.
        """
        of_update = (scaler.Cause.NONE, scaler.Cause.TOO_LARGE, scaler.Cause.UPDATE)
        return "cause" in attempt.outputs and attempt.cause not in of_update and self.take_at(1.0).finite

    def take(self, change: Any = None, batch: Any = None, factor: float = 1.0) -> Attempt:
        """Takes the step once, up to its gradients.

        Args:
            change: A context manager that changes something and puts it back; None for no change.
            batch: In the place of the step's own.
            factor: Of the loss scale, as for `listening`.
        """
        batch = self.moment.batch if batch is None else batch
        hears = listening(self.scalers, self._factor, moves=self.moves, nonzero=self._nonzero)
        with self.as_it_was(), change or contextlib.nullcontext(), hears as heard:
            self._factor.assign(factor)
            again = change is None and not self.moves
            step = self._traced_once(heard, batch) if again else self._traced(heard, batch)
            attempt = self._taken(step, batch)
            # A step of one's own may return no loss.
            lost = "loss" in attempt.outputs and not math.isfinite(attempt.loss)
            if attempt.finite or self.lower_from is None or lost:
                return attempt
            self.moment.reset()
            self._factor.assign(1.0 / self.lower_from)
            lower = self._taken(step, batch)
        return dataclasses.replace(lower, at_scale=1.0) if lower.finite else attempt

    def take_at(self, factor: float, batch: Any = None) -> Attempt:
        """Runs the step once with its loss scale multiplied by a factor.

        Args:
            factor: The factor.
            batch: A batch to take instead of the step's own.
        """
        batch = self.moment.batch if batch is None else batch
        hears = listening(self.scalers, self._factor, moves=False, nonzero=self._nonzero)
        with self.as_it_was(), hears as heard:
            self._factor.assign(factor)
            return self._taken(self._traced_once(heard, batch), batch)

    def _taken(self, step: Callable, batch: Any) -> Attempt:
        self._progress()
        for one in self._nonzero:
            one.assign(tf.zeros_like(one))
        before = [int(one.counters.applied) for one in self.scalers]
        returned, finite, losses = step(batch)
        after = [int(one.counters.applied) for one in self.scalers]
        known = [bool(one) for one in finite] or [then < now for then, now in zip(before, after, strict=True)]
        outputs = {name: value.numpy() for name, value in returned.items()}
        nonzero = np.concatenate([one.numpy() for one in self._nonzero]) if self._nonzero else None
        return dataclasses.replace(_attempt(outputs, known, losses), nonzero=nonzero)

    def _traced_once(self, heard: Heard, batch: Any) -> Callable:
        """The unchanged step, up to its gradients, for all batches of these shapes."""
        specs = tf.nest.map_structure(tf.type_spec_from_value, batch)
        if self._unchanged is None or self._unchanged[0] != specs:
            self._unchanged = (specs, self._traced(heard, batch))
        return self._unchanged[1]

    def _traced(self, heard: Heard, batch: Any) -> Callable:
        def taken(batch: Any) -> tuple[Any, list, list]:
            outputs = self.take_inlined(batch)
            return outputs, [] if "applied" in outputs else heard.finite, heard.losses_finite()

        return tf.function(taken, jit_compile=self.moment.jit_compile or None).get_concrete_function(batch)

    def take_inlined(self, batch: Any) -> Any:
        """The step in the graph that is being traced."""
        with inlined() if self._inlines else contextlib.nullcontext():
            return self.step(batch)

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Begins with the state before the step, and ends with it. A micro-batch is a step of its own inside."""
        step = self.moment.train_step
        self.moment.reset()
        alone = with_value(step, "window", None) if self.windowed else contextlib.nullcontext()
        try:
            with traced_anew(step), alone, not_regrouped() if self.literal else contextlib.nullcontext():
                yield
        finally:
            self.moment.reset()


def _attempt(outputs: dict, known: Sequence[bool], losses: Sequence[tf.Tensor] = ()) -> Attempt:
    applied = bool(outputs["applied"]) if "applied" in outputs else all(known)
    # Of a step that calls its loss otherwise, or returns none, the loss that was scaled is known.
    seen = all(map(bool, losses)) and bool(np.isfinite(outputs.get("loss", 0.0)))
    return Attempt(applied and seen, applied, float(outputs.get("loss", math.nan)), outputs)


def as_python(moment: Any) -> Callable:
    """The step as it was written, a function of a batch."""
    written = moment.train_step
    while hasattr(written, "python_function"):
        written = written.python_function
    if written is moment.train_step:
        return moment.take
    return taking_batches(written, moment.loop.element_spec)


@contextlib.contextmanager
def inlined() -> Iterator[None]:
    """Has functions that were compiled by themselves be traced as a part of what calls them."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


@contextlib.contextmanager
def not_regrouped() -> Iterator[None]:
    """Has TensorFlow leave the order of multiplications as it is written."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    try:
        yield
    finally:
        own = before.get("arithmetic_optimization", True)
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": own})


@contextlib.contextmanager
def traced_anew(train_step: Any) -> Iterator[None]:
    """Has a `TrainStep` forget the forward and backward pass that XLA compiled for it, for a while."""
    with train_step.retraced() if isinstance(train_step, TrainStep) else contextlib.nullcontext():
        yield
