"""Remembers, in eager mode, which scaled losses wait for their gradients. There is no graph to ask then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.assignments import age_of
from scaler.errors import InvalidArgument
from scaler.misuse.carried import KEEP_UNSCALED, Carried, retried_elsewhere
from scaler.misuse.functions_seen import FunctionsSeen
from scaler.misuse.losses_of_one_scale import LossesOfOneScale

_REMEMBERED = 32


class OpenLosses:
    """The losses that one scaler scaled in eager mode, in order, as groups with the same scale.

    A gradient that is older than a loss, or than the first tape that differentiated it, does not come from it. A
    gradient that is younger may. An `apply` to some variables ends all losses that its gradients may come from, for
    these variables alone.

    A call of a function that scales a loss and returns its gradients counts as a loss. So does one of a function that
    also applies them, but nothing waits for its gradients, and its scale is that of the last loss.

    Args:
        now: Returns the scale that multiplies the next loss. None if it never moves, and nothing has to be known.
    """

    def __init__(self, now: Callable[[], tf.Tensor] | None) -> None:
        self._now = now
        self._groups: list[LossesOfOneScale] = []
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
            self._add(LossesOfOneScale(loss_scale, loss_finite))

    def followed(self, by_a_tape: bool) -> Callable[[float], None]:
        """Records whether a tape follows the last loss from its scaling on.

        Returns:
            What to call with the age of what such a tape passes back through the loss; with infinity if the tape does
            so in a graph.
        """
        if self._now is None or not self._groups or not tf.executing_eagerly():
            return lambda age: None
        group = self._groups[-1]
        group.sees_tapes = by_a_tape and (group.losses == 1 or group.sees_tapes)
        return group.differentiated

    def of(self, method: str, grads: Sequence, variables: Sequence | None, used: tf.Tensor) -> Carried | None:
        """What gradients carry of their losses. None if nothing is known of them, and they carry the value of `used`.

        Raises:
            InvalidArgument: If they may carry several scales.
        """
        unseen = self._calls.some_are_unseen and self._groups
        if unseen and float(tf.convert_to_tensor(used)) not in self._groups[-1].scales:
            self._groups = []
        wanted = _ids(variables)
        sources = {id(group) for age in _ages(grads) for group in self._sources(age, wanted)}
        possible = [group for group in self._groups if id(group) in sources]
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

    def _sources(self, age: float, wanted: frozenset[int]) -> list[LossesOfOneScale]:
        """The groups that a gradient of this age may come from."""
        earlier = self._before(age)
        waiting = [group for group in earlier if group.waits_for(wanted)]
        # A gradient that is as a tape returned it belongs to the last loss that the tape passed.
        last = max(reversed(earlier), key=lambda group: group.last_pass(age), default=None)
        return waiting if last is None or last in waiting else [*waiting, last]

    def _before(self, age: float) -> list[LossesOfOneScale]:
        # Where no tape is known to have made it, as of a gradient by hand, any loss that is older may have.
        return [group for group in self._groups if group.may_be_of(age)] or [
            group for group in self._groups if group.is_older(age)
        ]

    def retried(self, grads: Sequence, loss_scale: tf.Tensor, lower: tf.Tensor) -> None:
        """Records that gradients were taken again: those of their losses now carry one scale or the other."""
        if self._now is None:
            return
        if not tf.executing_eagerly():
            self._calls.retries()
            return
        ages = _ages(grads)
        for group in self._groups:
            if float(loss_scale) in group.scales and any(map(group.may_be_of, ages)):
                group.may_also_carry(float(lower))

    def ends(self, grads: Sequence, variables: Sequence | None = None) -> None:
        """Records that gradients were unscaled, or applied to variables, or that a function does so."""
        if self._now is None:
            return
        if not tf.executing_eagerly():
            self._calls.takes()
            return
        ages, served = _ages(grads), _ids(variables)
        possible = {id(group) for age in ages for group in self._before(age)}
        older = [group for group in self._groups if id(group) in possible]
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
        group = LossesOfOneScale(None if takes else self._now(), None, id(function))
        group.is_retried = retries and not takes
        if takes and self._groups and self._groups[-1].function == id(function):
            self._groups.pop()  # As each step of a run does.
        self._add(group)

    @staticmethod
    def _end(groups: Sequence[LossesOfOneScale]) -> None:
        for group in groups:
            group.waits = False

    def _add(self, group: LossesOfOneScale) -> None:
        if len(self._groups) >= _REMEMBERED:
            ended = next((one for one in self._groups if not one.waits), None)
            if ended is not None:
                self._groups.remove(ended)
            else:
                first, second, *rest = self._groups
                second.join(first)
                self._groups = [second, *rest]
        self._groups.append(group)


def _ages(grads: Sequence) -> list[float]:
    return [age_of(gradients.values_of(grad)) for grad in grads if tf.is_tensor(grad)]


def _ids(variables: Sequence[Any] | None) -> frozenset[int]:
    return frozenset(id(replicas.native(variable)) for variable in variables or ())
