"""Which scaled losses wait for their gradients in eager mode, where there is no graph to ask.

Losses that one scale multiplied are one group. A function that was traced before scales losses and takes gradients
each time it is called, too.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.assignments import age_of
from scaler.backend.graphs import before_each_call, outermost_function
from scaler.backend.replicas import replica_count
from scaler.errors import InvalidArgument
from scaler.misuse.carried import KEEP_UNSCALED, Carried, retried_elsewhere

_GROUPS = 32
"""The most groups that are remembered."""


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
        if len(self._groups) >= _GROUPS:
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


_CALLS = 256
"""The most calls of tapes that a group remembers."""


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
        if len(self._differentiated) > _CALLS:
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


class FunctionsSeen:
    """What the functions traced so far do with a scaler.

    Args:
        called: Is called before each call of such a function, with its graph, and whether it scales losses, takes
            gradients and retries.
    """

    def __init__(self, called: Callable[[Any, bool, bool, bool], None]) -> None:
        self._called = called
        self._scale: weakref.WeakSet = weakref.WeakSet()
        self._take: weakref.WeakSet = weakref.WeakSet()
        self._retry: weakref.WeakSet = weakref.WeakSet()
        self.some_are_unseen = False
        """Whether a function may scale a loss of which `called` does not hear."""

    def scales(self) -> None:
        """Records that the function that is being traced scales a loss."""
        self._look_at(self._scale)

    def takes(self) -> None:
        """Records that it applies or unscales gradients, or ends the step."""
        self._look_at(self._take)

    def retries(self) -> None:
        """Records that it returns gradients that it has taken again."""
        self._look_at(self._retry)

    def _look_at(self, functions: weakref.WeakSet) -> None:
        graph = outermost_function()
        if replica_count() > 1 or graph is None or not before_each_call(self._look, ("functions seen", id(self))):
            self.some_are_unseen = True
        else:
            functions.add(graph)

    def _look(self, graph: Any) -> None:
        scales, takes, retries = (graph in functions for functions in (self._scale, self._take, self._retry))
        if tf.executing_eagerly():
            self._called(graph, scales, takes, retries)
            return
        # Another function calls this one, while it is traced.
        if scales:
            self.scales()
        if takes:
            self.takes()
        if retries:
            self.retries()
