"""The losses that one scale multiplied in eager mode, and which gradients may be theirs."""

from __future__ import annotations

from bisect import bisect_left

import tensorflow as tf

from scaler.backend.assignments import age_of

_REMEMBERED = 256


class LossesOfOneScale:
    """Losses that one scale multiplied.

    Attributes:
        loss_scale: The scale. None if it is not known.
        loss_finite: Whether all of them were finite. None if it is not known.
        function: Which function scaled them; None for eager mode.
        losses: How many they are.
        waits: Whether one of them may still be applied.
        served: The variables that they were applied to, by id.
        is_retried: Whether their gradients were taken again in a function, at a scale that is not known.
        sees_tapes: Whether every tape that differentiates one of them calls `differentiated`. A gradient that is older
            than all of these calls is then none of theirs.
    """

    def __init__(self, loss_scale: tf.Tensor | None, loss_finite: tf.Tensor | None, function: int | None = None):
        self.loss_scale, self.loss_finite, self.function = loss_scale, loss_finite, function
        self.losses, self.waits = 1, loss_scale is not None
        self.served: frozenset[int] = frozenset()
        self.is_retried = False
        self._others: set[float] = set()
        self.sees_tapes = False
        self._age = age_of(tf.constant(True) if loss_finite is None else loss_finite)
        self._differentiated: list[float] = []

    @property
    def scales(self) -> set[float]:
        """The scales that gradients of these losses may carry."""
        return self._others if self.loss_scale is None else {float(self.loss_scale), *self._others}

    def may_also_carry(self, loss_scale: float) -> None:
        """Records that some of their gradients carry another scale."""
        self._others = {*self._others, loss_scale}

    def differentiated(self, age: float) -> None:
        """Records the age of what a tape passes back through one of them. The gradients of that tape are younger.

        An age of infinity is that of a graph. Nothing tells then when its gradients are computed.
        """
        if age == float("inf"):
            self.sees_tapes = False
            return
        self._differentiated.append(age)
        if len(self._differentiated) > _REMEMBERED:
            del self._differentiated[1]

    def add(self, loss_finite: tf.Tensor) -> None:
        """Takes another loss of the same scale in."""
        self.losses += 1
        self.loss_finite = None if self.loss_finite is None else tf.logical_and(self.loss_finite, loss_finite)

    def join(self, earlier: LossesOfOneScale) -> None:
        """Takes an earlier group in. Which of their scales a gradient carries is then unknown."""
        self.losses += earlier.losses
        self.served &= earlier.served
        self.loss_finite = self.function = None
        self._age = earlier._age
        self.sees_tapes = self.sees_tapes and earlier.sees_tapes
        self._differentiated = sorted(self._differentiated + earlier._differentiated)
        self._others = set(sorted({*self._others, *earlier.scales})[:2])

    def is_older(self, age: float) -> bool:
        """Whether they are older than a gradient of this age."""
        return self._age < age

    def may_be_of(self, age: float) -> bool:
        """Whether a gradient of this age may be one of theirs."""
        return self.last_pass(age) >= 0.0 if self.sees_tapes else self.is_older(age)

    def last_pass(self, age: float) -> float:
        """The age of the last tape's pass, or of the losses if none is seen, before a gradient; -1 if there is none."""
        if not self.sees_tapes:
            return self._age
        place = bisect_left(self._differentiated, age)
        return self._differentiated[place - 1] if place else -1.0

    def waits_for(self, variables: frozenset[int]) -> bool:
        """Whether one of them may still be applied to some of these variables."""
        return self.waits and not (variables and variables <= self.served)
