"""Tracks in which order a loss scaler is used while steps are traced or run eagerly, and warns of a wrong one.

What `unscale` made of gradients is told from what it was given, and so new values of variables that it divided.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from scaler import gradients
from scaler.backend.graphs import in_xla, is_eager
from scaler.backend.replicas import replica_count
from scaler.backend.variables import choose
from scaler.errors import InvalidArgument, ScaleWarning
from scaler.misuse.carried import TO_APPLY
from scaler.misuse.marks import LOSS_SCALE, READ, UNSCALED, given_to_unscale, kind_of
from scaler.misuse.open_step import OpenStep
from scaler.misuse.trace import kinds_behind

_READ = "loss_scale was read outside of a tape, and nothing was scaled since the last step"
_INSTEAD = (
    "Scale the loss with scale(loss), or read loss_scale while the tape records. For logging use outcome.loss_scale."
)
_NOT_COUNTED = "no step is counted"
_KEPT = ("Placeholder", "ReadVariableOp")
_PASS_ON = ("Identity", "Cast")
_DIVISIONS = ("RealDiv", "Div")
_BY_CONSTANTS = (*_DIVISIONS, "Mul")


class Use:
    """How one loss scaler was used so far in this process. It gives each warning once.

    Attributes:
        asked: Whether anyone scaled a loss, unscaled gradients or read the scale.
        read: Whether the scale was read outside a tape since a loss was last scaled. Gradients may then carry it.
        has_unscaled: Whether `unscale` was ever called.
        unscaled: What the last `unscale` was given in eager mode, as weak references, and the shapes of what it made.
            Empty if another step was opened since.
        statistics_are_kept: Whether somebody else rolls back what a model's forward pass moved, as `protect` does.
        unconnected_are_named: Whether somebody else names variables without a gradient: a `LossScaleOptimizer` knows
            which of them its caller passed.
        leaves_count: Whether an `apply(update=False)` left the count to `update`.
    """

    def __init__(self) -> None:
        self.asked = self.read = self.statistics_are_kept = self.unconnected_are_named = self.leaves_count = False
        self.unscaled: list[tuple[weakref.ref, Any]] = []
        self.has_unscaled = self._stepped = self._ends = False
        self._said: set[str] = set()
        self._ended_in: Any = None

    def __getstate__(self) -> dict:
        # What refers to a graph or to gradients does not go into another process.
        return {**vars(self), "_ended_in": None, "unscaled": []}

    def begins(self) -> None:
        """Records an open step: something was scaled, unscaled or left to `update`."""
        self.asked = self._stepped = True
        self._ended_in = None

    def scales(self) -> None:
        """Records that a loss was scaled."""
        self.begins()
        self.read, self.unscaled = False, []

    def scales_by_hand(self) -> None:
        """Records that the scale was read while a tape records."""
        self.asked, self.unscaled = True, []

    def unscales(self, grads: Sequence, result: Sequence) -> None:
        """Records what `unscale` was given and returned."""
        self.unscaled, self.has_unscaled = [], True
        if tf.executing_eagerly():
            made = zip(_values(grads), _values(result), strict=True)
            self.unscaled = [(weakref.ref(before), after.shape) for before, after in made]

    def was_unscaled(self, values: tf.Tensor) -> bool:
        """Whether these values are a gradient that the last `unscale` was given, in eager mode."""
        return any(given() is values for given, _ in self.unscaled)

    def check_ended(self, attempted: int) -> None:
        """Warns if gradients were unscaled and nothing counts steps: neither `apply` nor `update` was ever called.

        Args:
            attempted: The steps counted so far, by functions that another process traced, too.
        """
        if self.has_unscaled and not self._ends and not attempted:
            self.say_once(
                "unscale(grads) was used, and no step was ever counted: nothing looks whether the gradients are "
                f"finite, and the scale never moves. Pass what it returned to {TO_APPLY}, or end the step with "
                "update(Event(finite=all_finite(grads))).",
                _NOT_COUNTED,
            )

    def check_decided(self, who: str, steps: int, attempted: int, step: OpenStep) -> None:
        """Warns if losses were scaled in steps that counted nothing. It says nothing if no step is open after others.

        Args:
            who: The loss scaler, as the beginning of a sentence.
            steps: How many steps counted nothing.
            attempted: The steps counted before them.
            step: What the last `scale` left.
        """
        if step.last_scale() > 0.0 and not (attempted and step.is_decided()):
            self.check_ended(attempted)
            why = (
                "Either the optimizer got the scaled gradients: pass them to apply(optimizer, grads, variables). "
                "Or when= of apply was never True. That is right within a window of more steps, but `norm < limit` is "
                "False after every overflow: write `(norm < limit) | ~tf.math.is_finite(norm)`, or put a SpikeGuard "
                "around the strategy."
            )
            if self.leaves_count and not self._ends:
                why = "apply(update=False) leaves the count to update(event), which nothing called: end steps with it."
            self.say_once(
                f"{who} scaled losses in the last {steps:,} steps, and no step was decided: the loss scale does not "
                f"move. {why}",
                _NOT_COUNTED,
            )

    def ends(self) -> None:
        """Records that the step was counted and the scale adjusted."""
        self._ends, self._ended_in = True, _here()

    def was_read(self, step: OpenStep, scale: Callable) -> None:
        """Records that the scale was read outside a tape. If it is the scale of the open step, nothing is in doubt."""
        self.asked = True
        known = self._stepped and tf.executing_eagerly() and not step.is_decided()
        self.read = self.read or not known or step.last_scale() != float(scale())

    def check_unscaled(self, grads: Sequence) -> None:
        """Warns in eager mode about gradients that seem to come from `unscale`. In a graph their marks tell."""
        if not self.unscaled or not tf.executing_eagerly():
            return
        values = _values(grads)
        are_alike = [one.shape for one in values] == [shape for _, shape in self.unscaled]
        if are_alike and not any(map(self.was_unscaled, values)):
            self.say_once(
                "apply(grads): these gradients seem to be computed from the result of unscale, and are divided by the "
                "loss scale again: pass unscaled=True, or the gradients of the scaled loss themselves."
            )

    def check_open(self, step: OpenStep) -> None:
        """Warns if no step is open, because the last call already ended one in the same graph or in eager mode.

        A scaler that receives only events is being studied and gives no warning. Neither do several replicas: they are
        traced in turns, which look like steps.

        Args:
            step: Knows whether something was scaled since, also by functions that were traced before.
        """
        if not self._stepped or self._ended_in is None or self._ended_in != _here() or replica_count() > 1:
            return
        if not tf.executing_eagerly() or step.is_decided():
            self.say_once(
                "update(event): apply or an update already counted the last step, and nothing was scaled since: one "
                "step moves the scale twice. Leave this update out, or pass update=False to apply."
            )

    def check_one_scale(self, method: str, step: OpenStep, scale: Callable) -> None:
        """Refuses gradients in eager mode if it is unknown which of two scales they carry."""
        if not self.read or not tf.executing_eagerly() or not step.is_decided():
            return
        used, now = step.last_scale(), float(scale())
        if used > 0.0 and used != now:
            raise InvalidArgument(
                f"{method}(grads): {_READ}: the gradients may carry its scale of {used:g} or the present one of "
                f"{now:g}. {_INSTEAD}"
            )

    def say_once(self, sentence: str | None, mistake: str | None = None) -> None:
        """Warns the first time this sentence, or another one of the same mistake, applies to this scaler.

        Args:
            sentence: The warning; None if there is nothing to say.
            mistake: What it is about, if several sentences are about the same.
        """
        if sentence is not None and (mistake or sentence) not in self._said:
            self._said.add(mistake or sentence)
            warnings.warn(sentence, ScaleWarning, stacklevel=4)


def one_scale(decided: tf.Tensor, used: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
    """Returns `used`. Fails in a running graph as `check_one_scale` does in eager mode.

    XLA drops a check. There the scale is NaN, and the step is skipped.
    """
    known = tf.logical_or(tf.logical_not(decided), tf.equal(used, now))
    if in_xla():
        return choose(known, used, float("nan"))
    said = f"the gradients may carry its scale or the present one, which are ({_INSTEAD})"
    check: Any = tf.debugging.Assert(known, [f"apply or unscale: {_READ}: {said}:", used, now])
    with tf.control_dependencies([check]):
        return tf.identity(used)


def _values(grads: Sequence) -> list:
    return [gradients.values_of(grad) for grad in grads if tf.is_tensor(grad)]


def _here() -> Any:
    return "eager" if tf.executing_eagerly() else weakref.ref(tf.compat.v1.get_default_graph())


def undivided(
    grads: Sequence[gradients.Gradient], variables: Sequence, unscaled: bool | tf.Tensor, use: Use
) -> list[gradients.Gradient]:
    """Gradients that may be unscaled already, with new values as they were before `unscale` divided them.

    `unscale` does not know the variables, so that it divides everything; what it made of a gradient remembers what it
    was. A new value that was changed since, or came from elsewhere, may be a divided one.

    Args:
        grads: A gradient or None for each variable.
        variables: What they are applied to.
        unscaled: Scalar bool, whether they are unscaled.
        use: Knows whether anything ever was.

    Raises:
        InvalidArgument: If a new value may have been divided by the scale.
    """
    if unscaled is False or (is_eager(unscaled) and not bool(unscaled)):
        return list(grads)
    return [
        _undivided(grad, variable, use) if gradients.overwrites(variable) and grad is not None else grad
        for grad, variable in zip(grads, variables, strict=True)
    ]


def _undivided(grad: gradients.Gradient, variable: object, use: Use) -> gradients.Gradient:
    values = gradients.values_of(grad)
    given = given_to_unscale(values)
    if given is not None:
        return given
    if _may_be_divided(values, use):
        name = getattr(variable, "path", getattr(variable, "name", "?"))
        raise InvalidArgument(
            f"apply(grads, unscaled=True): the gradient of variable {name!r} is its new value, and a loss scale may "
            "have divided it: expected the gradient of the tape, or what unscale(grads, variables) returned for it, "
            "unchanged and in the same function. Or pass scaled gradients with apply(..., loss_scale=...)."
        )
    return grad


def _may_be_divided(values: tf.Tensor, use: Use) -> bool:
    if is_eager(values):
        return use.has_unscaled and not use.was_unscaled(values)
    *_, last = _passed_on(values)
    if last.op.type in _DIVISIONS and any(kind_of(one) in (LOSS_SCALE, READ) for one in _passed_on(last.op.inputs[1])):
        return True
    return use.has_unscaled and (last.op.type in _KEPT or UNSCALED in kinds_behind([values]))


def _passed_on(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """A tensor of a graph, and what it is but for identities, casts and constant factors."""
    yield tensor
    while tensor.op.type in _PASS_ON or (tensor.op.type in _BY_CONSTANTS and tensor.op.inputs[1].op.type == "Const"):
        tensor = tensor.op.inputs[0]
        yield tensor
