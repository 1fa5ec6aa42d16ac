"""Remembers, in eager mode, which scaled losses wait for their gradients. There is no graph to ask then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.assignments import age_of
from scaler.errors import InvalidArgument
from scaler.mistakes.carried import KEEP_UNSCALED, Carried, retried_elsewhere
from scaler.mistakes.functions_seen import FunctionsSeen

_REMEMBERED = 32


class OpenLosses:
    """The losses that one scaler scaled in eager mode, in order, as groups with the same scale.

    A gradient that is older than a loss does not come from it. A gradient that is younger may. An `apply` to some
    variables ends all losses that its gradients may come from, for these variables alone.

    A call of a function that scales a loss and returns its gradients counts as a loss. So does one of a function that
    also applies them, but nothing waits for its gradients, and its scale is that of the last loss.

    Args:
        now: Returns the scale that multiplies the next loss. None if it never moves, and nothing has to be known.
    """

    def __init__(self, now: Callable[[], tf.Tensor] | None) -> None:
        self._now = now
        self._groups: list[_Group] = []
        self._calls = FunctionsSeen(self._called)

    def __reduce__(self) -> tuple:
        # A copy in another process knows no function.
        return OpenLosses, (self._now,)

    def opened(self, loss_scale: tf.Tensor, loss_finite: tf.Tensor) -> None:
        """Records that a loss was scaled, or that a function which is traced scales one."""
        if self._now is None:
            return
        if not tf.executing_eagerly():
            self._calls.scales()
            return
        last = self._groups[-1] if self._groups else None
        if last is not None and last.waits and not last.served and last.scales == {float(loss_scale)}:
            last.add(loss_finite)
        else:
            self._add(_Group(loss_scale, loss_finite))

    def of(self, method: str, grads: Sequence, variables: Sequence | None, used: tf.Variable) -> Carried | None:
        """What gradients carry of their losses. None if nothing is known of them, and they carry the value of `used`.

        Raises:
            InvalidArgument: If they may carry several scales.
        """
        unseen = self._calls.some_are_unseen and self._groups
        if unseen and float(tf.convert_to_tensor(used)) not in self._groups[-1].scales:
            self._groups = []
        wanted, ages = _ids(variables), _ages(grads)
        earlier = [group for group in self._groups if any(map(group.is_older, ages))]
        possible = [group for group in earlier if group.waits_for(wanted)] or earlier[-1:]
        if any(group.is_retried for group in possible):
            raise retried_elsewhere(method)
        scales = list(dict.fromkeys(scale for group in possible for scale in group.scales))
        if len(scales) > 1:
            raise InvalidArgument(
                f"{method}(grads): several losses were scaled that were not applied yet, and the loss scale moved "
                f"between them. These gradients may carry a scale of {' or '.join(f'{one:g}' for one in scales)}: "
                "expected gradients of one scale. Apply or unscale the gradients of a loss before the next one is "
                "scaled, or put the step into a tf.function, which knows the loss of each gradient. "
                f"{KEEP_UNSCALED}"
            )
        found = possible[-1:]
        return Carried(found[0].loss_scale, found[0].loss_finite) if found and found[0].loss_scale is not None else None

    def retried(self, grads: Sequence, loss_scale: tf.Tensor, lower: tf.Tensor) -> None:
        """Records that gradients were taken again: those of their losses now carry one scale or the other."""
        if self._now is None:
            return
        if not tf.executing_eagerly():
            self._calls.retries()
            return
        ages = _ages(grads)
        for group in self._groups:
            if float(loss_scale) in group.scales and any(map(group.is_older, ages)):
                group.may_also_carry(float(lower))

    def ends(self, grads: Sequence, variables: Sequence | None = None) -> None:
        """Records that gradients were unscaled, or applied to variables, or that a function does so."""
        if self._now is None:
            return
        if not tf.executing_eagerly():
            self._calls.takes()
            return
        ages, served = _ages(grads), _ids(variables)
        older = [group for group in self._groups if any(map(group.is_older, ages))]
        for group in older:
            group.served |= served
            group.waits = group.waits and variables is not None
        if older and older[-1].losses == 1:
            for group in older:
                # Micro-batches are several calls of one function.
                is_of_last = group is older[-1] or (group.function is not None and group.function == older[-1].function)
                group.waits = group.waits and not is_of_last

    def end_all(self, finite: tf.Tensor) -> None:
        """Records that the step ended: no gradient of any loss will be applied if it was not finite."""
        if self._now is None:
            return
        if not tf.executing_eagerly():
            self._calls.takes()
        elif not bool(finite):
            self._end(self._groups)

    def _called(self, function: Any, scales: bool, takes: bool, retries: bool) -> None:
        assert self._now is not None
        if not scales and (takes or not retries):
            # Another function made what it takes.
            self._end([group for group in self._groups if group.function is not None])
            return
        group = _Group(None if takes else self._now(), None, id(function))
        group.is_retried = retries and not takes
        if takes and self._groups and self._groups[-1].function == id(function):
            self._groups.pop()  # As each step of a run does.
        self._add(group)

    @staticmethod
    def _end(groups: Sequence[_Group]) -> None:
        for group in groups:
            group.waits = False

    def _add(self, group: _Group) -> None:
        if len(self._groups) >= _REMEMBERED:
            ended = next((one for one in self._groups if not one.waits), None)
            if ended is not None:
                self._groups.remove(ended)
            else:
                first, second, *rest = self._groups
                second.join(first)
                self._groups = [second, *rest]
        self._groups.append(group)


class _Group:
    """Losses that one scale multiplied.

    Attributes:
        loss_scale: The scale. None if it is not known.
        loss_finite: Whether all of them were finite. None if it is not known.
        function: Which function scaled them; None for eager mode.
        losses: How many they are.
        waits: Whether one of them may still be applied.
        served: The variables that they were applied to, by id.
        is_retried: Whether their gradients were taken again in a function, at a scale that is not known.
    """

    def __init__(self, loss_scale: tf.Tensor | None, loss_finite: tf.Tensor | None, function: int | None = None):
        self.loss_scale, self.loss_finite, self.function = loss_scale, loss_finite, function
        self.losses, self.waits = 1, loss_scale is not None
        self.served: frozenset[int] = frozenset()
        self.is_retried = False
        self._others: set[float] = set()
        self._age = age_of(tf.constant(True) if loss_finite is None else loss_finite)

    @property
    def scales(self) -> set[float]:
        """The scales that gradients of these losses may carry."""
        return self._others if self.loss_scale is None else {float(self.loss_scale), *self._others}

    def may_also_carry(self, loss_scale: float) -> None:
        """Records that some of their gradients carry another scale."""
        self._others = {*self._others, loss_scale}

    def add(self, loss_finite: tf.Tensor) -> None:
        """Takes another loss of the same scale in."""
        self.losses += 1
        self.loss_finite = None if self.loss_finite is None else tf.logical_and(self.loss_finite, loss_finite)

    def join(self, earlier: _Group) -> None:
        """Takes an earlier group in. Which of their scales a gradient carries is then unknown."""
        self.losses += earlier.losses
        self.served &= earlier.served
        self.loss_finite = self.function = None
        self._age = earlier._age
        self._others = set(sorted({*self._others, *earlier.scales})[:2])

    def is_older(self, age: float) -> bool:
        return self._age < age

    def waits_for(self, variables: frozenset[int]) -> bool:
        return self.waits and not (variables and variables <= self.served)


def _ages(grads: Sequence) -> list[float]:
    return [age_of(gradients.values_of(grad)) for grad in grads if tf.is_tensor(grad)]


def _ids(variables: Sequence[Any] | None) -> frozenset[int]:
    return frozenset(id(replicas.native(variable)) for variable in variables or ())
