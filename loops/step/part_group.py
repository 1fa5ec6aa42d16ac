"""The parts of a step about which one loss scaler decides: a part alone, or all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

import scaler
from loops.step.accumulation import MicroBatches
from loops.step.again import Differentiate
from loops.step.parts import Part
from loops.step.teachers import Teacher
from loops.step.turns import Taken


class Retried(NamedTuple):
    """The gradients that a group decides about, after they were taken as often as it took.

    Attributes:
        grads: Scaled gradients of all parts, or None.
        loss_scale: What they are scaled by, scalar float32.
        retries: How often they were taken again, scalar int64.
    """

    grads: list
    loss_scale: tf.Tensor
    retries: tf.Tensor


class Decided(NamedTuple):
    """What a group decided.

    Attributes:
        attempted: Scalar bool, whether it was to decide.
        applied: Scalar bool, whether all parts moved.
        cause: Scalar int64, why they did not, a `scaler.Cause`.
        variable: Scalar int64, the variable to look at first, as a position in the weights of all parts; or -1.
        outcomes: Of each part.
    """

    attempted: tf.Tensor
    applied: tf.Tensor
    cause: tf.Tensor
    variable: tf.Tensor
    outcomes: list[scaler.Outcome]


class PartGroup(tf.Module):
    """Parts, their masters, the sums of their window, and the loss scaler that decides about them.

    Args:
        parts: One, or all of a step.
        loss_scaler: The scaler.
        accumulate: Micro-batches per step.
        state: State of layers that is put back if the parts are skipped, as far as it is known beforehand.
        others: The state that other groups put back.

    Attributes:
        parts: The argument.
        loss_scaler: The argument.
        weights: The variables that each part moves.
        masters: The masters of each part, or None.
        window: The sums of all of them, or None.
    """

    def __init__(
        self, parts: Sequence[Part], loss_scaler: scaler.LossScaler, accumulate: int, state: list, others: list
    ):
        super().__init__(name="part_group")
        self.parts, self.loss_scaler = list(parts), loss_scaler
        self.weights = [part.variables for part in parts]
        self._others, self._accumulate = set(map(id, others)), accumulate
        self.masters = [_masters(weights) for weights in self.weights]
        self._teachers = [
            part.teacher and Teacher(part.teacher, part.model, masters, part.momentum)
            for part, masters in zip(self.parts, self.masters, strict=True)
        ]
        flat = [variable for weights in self.weights for variable in weights]
        self.window = MicroBatches({0: accumulate}, flat, state) if accumulate > 1 else None

    @property
    def teachers_masters(self) -> list[scaler.MasterWeights | None]:
        """The masters of the teachers."""
        return [teacher.masters for teacher in self._teachers if teacher]

    def before(self, moved: scaler.Snapshot) -> scaler.Snapshot:
        """What a skip puts back: the state as it was before the step, or before the first micro-batch of its window.

        Args:
            moved: What the pass has moved, with the values before it.
        """
        own = [pair for pair in zip(moved.variables, moved.values, strict=True) if id(pair[0]) not in self._others]
        now = scaler.Snapshot(tuple(one for one, _ in own), tuple(value for _, value in own))
        return self.window.open(now) if self.window else now

    def retry(self, taken: Sequence[Taken], again: Differentiate | None, turn: tf.Tensor | bool) -> Retried:
        """Takes the gradients of all parts again where only their scaled backward passes overflowed.

        Args:
            taken: The passes of the parts.
            again: From an output gradient to the gradients of all parts, with a new forward pass; None for those of
                the passes that were taken.
            turn: Whether it is the parts' turn.

        Raises:
            scaler.InvalidArgument: If they can be taken only once.
        """
        again = again or _of_all(taken)
        if again is None:
            names = " and ".join(repr(part.name) for part in self.parts)
            raise scaler.InvalidArgument(f"ComposedStep(retry=True): the gradients of {names} {NO_RETRY}")
        carried = self.loss_scaler.scale_of_gradients
        return Retried(*self.loss_scaler.retry(_gradients(taken), again, when=turn, loss_scale=carried))

    @scaler.authoring.no_autograph
    def decide(
        self, taken: Sequence[Taken], before: scaler.Snapshot, due: tf.Tensor | None, retried: Retried | None = None
    ) -> Decided:
        """Applies or skips, and lets teachers follow.

        Args:
            taken: The passes of the parts.
            before: What `before` returned.
            due: Whether it is the parts' turn, scalar bool; None for always.
            retried: What `retry` returned; None if it was not called.
        """
        grads = retried.grads if retried else _gradients(taken)
        loss_scale = retried.loss_scale if retried else None
        when: Any = True if due is None else due
        if self.window:
            loss_scale = retried.loss_scale if retried else self.loss_scaler.scale_of_gradients
            may_branch = not scaler.authoring.selects(self.loss_scaler)
            self.window.add(grads, loss_scale, may_branch, length=self._accumulate)
            before.restore_unless(self.window.whole)
            grads, _ = self.window.mean(grads)
            when = self.window.complete if due is None else tf.logical_and(self.window.complete, due)
        if len(self.parts) > 1:
            decided = self._together(grads, before, when, loss_scale)
        else:
            outcome = self._apply(0, grads, before, when, loss_scale=loss_scale)
            variable = _among(self.weights[0], outcome.variable)
            decided = Decided(tf.convert_to_tensor(when), outcome.finite, outcome.cause, variable, [outcome])
        for teacher, outcome in zip(self._teachers, decided.outcomes, strict=True):
            if teacher:
                teacher.follow(outcome.finite)
        return decided

    def _apply(self, place: int, grads: list, before: scaler.Snapshot, when: Any, **options: Any) -> scaler.Outcome:
        part = self.parts[place]
        return self.loss_scaler.apply(
            part.optimizer,
            grads,
            self.masters[place] or self.weights[place],
            clip_norm=part.clip_norm,
            clip=part.clip,
            rollback=before,
            when=when,
            **options,
        )

    def _together(self, grads: list, before: scaler.Snapshot, when: Any, loss_scale: tf.Tensor | None) -> Decided:
        """One decision over the gradients of all parts; then each optimizer takes its own where all were finite."""
        loss_scale = self.loss_scaler.scale_of_gradients if loss_scale is None else loss_scale
        rest, shares = iter(grads), []
        for part, own, masters in zip(self.parts, self.weights, self.masters, strict=True):
            grads_of_part = [next(rest) for _ in own]
            shares.append(scaler.Share(part.optimizer, grads_of_part, masters or own, part.clip_norm, part.clip))
        judged, outcomes = scaler.apply_together(
            self.loss_scaler,
            shares,
            rollback=before,
            when=when,
            loss_scale=loss_scale,
        )
        weights = [weight for own in self.weights for weight in own]
        variable = _among(weights, judged.variable)
        return Decided(tf.convert_to_tensor(when), judged.finite, judged.cause, variable, outcomes)


def _gradients(taken: Sequence[Taken]) -> list:
    return [grad for one in taken for grad in one.grads]


def _of_all(taken: Sequence[Taken]) -> Differentiate | None:
    """From an output gradient to the gradients of all parts; None if those of one cannot be had again."""
    looks = [one.again for one in taken if one.again is not None]
    return None if len(looks) < len(taken) else lambda small: [grad for look in looks for grad in look(small)]


NO_RETRY = (
    "can be taken only once, because the pass calls Python (a tf.py_function), because a BatchNorm synchronises its "
    "statistics over replicas, or because a part with every= draws from tf.random.normal, prints or reads an iterator: "
    "draw from a tf.random.Generator or a keras.random.SeedGenerator, or do without retry."
)
"""Why a step that is traced cannot be retried."""


def _among(weights: list, position: tf.Tensor) -> tf.Tensor:
    """A position in the weights; -1 for a variable of an optimizer, which come after the weights."""
    return tf.where(tf.logical_and(position >= 0, position < len(weights)), position, -1)


def _masters(weights: list) -> scaler.MasterWeights | None:
    narrow = any(variable.dtype in ("float16", "bfloat16") for variable in weights)
    return scaler.MasterWeights(weights) if narrow else None
