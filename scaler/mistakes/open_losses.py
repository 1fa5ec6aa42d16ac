"""Remembers, in eager mode, which scaled losses wait for their gradients. There is no graph to ask then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.assignments import age_of
from scaler.errors import InvalidArgument
from scaler.mistakes.carried import KEEP_UNSCALED, Carried

_REMEMBERED = 32


class OpenLosses:
    """The losses that one scaler scaled in eager mode, in order, as groups with the same scale.

    A gradient that is older than a loss does not come from it. A gradient that is younger may. An `apply` to some
    variables ends all losses that its gradients may come from, for these variables alone.
    """

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self.graphs_scale = False
        """Whether a graph scaled a loss, too. The last loss may then be one of its."""

    def __getstate__(self) -> dict:
        return {"_groups": [], "graphs_scale": True}

    def opened(self, loss_scale: tf.Tensor, loss_finite: tf.Tensor) -> None:
        """Records that a loss was scaled."""
        last = self._groups[-1] if self._groups else None
        if last is not None and last.waits and not last.served and float(last.loss_scale) == float(loss_scale):
            last.losses += 1
            last.loss_finite = tf.logical_and(last.loss_finite, loss_finite)
            return
        self._groups = [*self._groups[1 - _REMEMBERED :], _Group(loss_scale, loss_finite)]

    def of(self, method: str, grads: Sequence, variables: Sequence | None, used: tf.Variable) -> Carried | None:
        """What gradients carry of their losses. None if nothing is known of them, and they carry the value of `used`.

        Raises:
            InvalidArgument: If they may carry several scales.
        """
        if (
            self.graphs_scale
            and self._groups
            and float(self._groups[-1].loss_scale) != float(tf.convert_to_tensor(used))
        ):
            self._groups = []
        wanted, ages = _ids(variables), _ages(grads)
        possible = [group for group in self._groups if group.waits_for(wanted) and any(map(group.is_older, ages))]
        if len({float(group.loss_scale) for group in possible} if len(possible) > 1 else possible) > 1:
            scales = " or ".join(f"{one:g}" for one in dict.fromkeys(float(group.loss_scale) for group in possible))
            raise InvalidArgument(
                f"{method}(grads): several losses were scaled that were not applied yet, and the loss scale moved "
                f"between them. These gradients may carry a scale of {scales}: expected gradients of one scale. Apply "
                f"or unscale the gradients of a loss before the next one is scaled, or put the step into a "
                f"tf.function, which knows the loss of each gradient. {KEEP_UNSCALED}"
            )
        earlier = [group for group in self._groups if any(map(group.is_older, ages))]
        found = (possible or earlier)[-1:]
        return Carried(found[0].loss_scale, found[0].loss_finite) if found else None

    def ends(self, grads: Sequence, variables: Sequence | None = None) -> None:
        """Records that gradients were unscaled, or applied to variables."""
        ages, served = _ages(grads), _ids(variables)
        older = [group for group in self._groups if any(map(group.is_older, ages))]
        for group in older:
            group.served |= served
            group.waits = group.waits and variables is not None
        if older and older[-1].losses == 1:
            older[-1].waits = False

    def end_all(self) -> None:
        """Records that no gradient of any loss will be applied."""
        for group in self._groups:
            group.waits = False


class _Group:
    """Losses that one scale multiplied.

    Attributes:
        loss_scale: The scale.
        loss_finite: Whether all of them were finite.
        losses: How many they are.
        waits: Whether one of them may still be applied.
        served: The variables that they were applied to, by id.
    """

    def __init__(self, loss_scale: tf.Tensor, loss_finite: tf.Tensor) -> None:
        self.loss_scale, self.loss_finite = loss_scale, loss_finite
        self.losses, self.waits = 1, True
        self.served: frozenset[int] = frozenset()
        self._age = age_of(loss_finite)

    def is_older(self, age: float) -> bool:
        return self._age < age

    def waits_for(self, variables: frozenset[int]) -> bool:
        return self.waits and not (variables and variables <= self.served)


def _ages(grads: Sequence) -> list[float]:
    return [age_of(gradients.values_of(grad)) for grad in grads if tf.is_tensor(grad)]


def _ids(variables: Sequence[Any] | None) -> frozenset[int]:
    return frozenset(id(replicas.native(variable)) for variable in variables or ())
