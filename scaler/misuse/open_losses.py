"""Which scaled losses wait for their gradients in eager mode, where there is no graph to ask.

Losses that one scale multiplied are one group. A function that was traced before scales losses and takes gradients
each time it is called, too.

A tape that differentiates a scaled loss passes through it. If none did, the gradients are not those of it. They may
still carry the scale if they were computed without a tape, or in a function, or if the user multiplied by the scale:
then nothing is said. A false alarm is worse than a miss.
"""

from __future__ import annotations

import dataclasses
import weakref
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.assignments import age_of
from scaler.backend.graphs import before_each_call, outermost_function, tape_records
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
        self._recorded, self._in_functions = _Recorded(), False

    def __reduce__(self) -> tuple:
        # A copy in another process knows no function.
        return OpenLosses, (self._now,)

    def opened(self, loss_scale: tf.Tensor, loss_finite: tf.Tensor) -> None:
        """Records that a loss was scaled, or that a function which is traced scales one."""
        if self._leaves_to_functions("scales"):
            return
        last = self._groups[-1] if self._groups else None
        if last is not None and last.waits and not last.served and last.scales == {float(loss_scale)}:
            last.add(loss_finite)
        else:
            self._add(LossesOfOneScale(loss_scale, loss_finite))

    def scaled(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the last loss that was scaled, with the same gradient, which tells when a tape passes through it."""
        if not tf.executing_eagerly():
            self._in_functions = True
            return loss
        now, group, records = self._recorded, self._groups[-1] if self._groups else None, tape_records()
        if group is not None:
            group.sees_tapes = records and (group.losses == 1 or group.sees_tapes)
        if not records:
            now.in_doubt = True
            return loss

        @tf.custom_gradient
        def passed(value: tf.Tensor) -> tuple:
            def backward(upstream: tf.Tensor) -> tf.Tensor:
                now.in_doubt = True
                passed_back = tf.identity(upstream)
                if group is not None:
                    group.differentiated(age_of(passed_back) if tf.executing_eagerly() else float("inf"))
                return passed_back

            return tf.identity(value), backward

        result = passed(loss)
        now.age = age_of(result)
        return result

    def scaled_by_hand(self) -> None:
        """Records that the user multiplies something by the scale."""
        self._recorded.in_doubt = True

    def taken(self, method: str, grads: Sequence[gradients.Gradient]) -> str | None:
        """Records that gradients are unscaled or applied.

        Args:
            method: Who takes them.
            grads: The gradients.

        Returns:
            A warning if they certainly come from none of the losses that were scaled since the last call, else None.
        """
        if not tf.executing_eagerly():
            return None
        last, self._recorded = self._recorded, _Recorded()
        # A gradient that is older is kept from before.
        are_younger = all(last.age < age < float("inf") for age in _ages(grads))
        if last.in_doubt or self._in_functions or last.age < 0 or not are_younger:
            return None
        return (
            f"{method}(grads): the gradients are divided by the loss scale, but no tape has differentiated what "
            "scale(loss) (scale_loss of a LossScaleOptimizer) returned: they seem to be gradients of the unscaled "
            "loss, and the step would be too small by this factor. Differentiate the result: "
            "tape.gradient(scale(loss), variables)."
        )

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
        if self._leaves_to_functions("retries"):
            return
        ages = _ages(grads)
        for group in self._groups:
            if float(loss_scale) in group.scales and any(map(group.may_be_of, ages)):
                group.may_also_carry(float(lower))

    def ends(self, grads: Sequence, variables: Sequence | None = None) -> None:
        """Records that gradients were unscaled, or applied to variables, or that a function does so."""
        if self._leaves_to_functions("takes"):
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
        if not self._leaves_to_functions("takes") and not bool(finite):
            for group in self._groups:
                group.waits = False

    def _leaves_to_functions(self, what: str) -> bool:
        """Whether the scale never moves, or this is a function that is traced, of which it records what it does."""
        if self._now is not None and not tf.executing_eagerly():
            self._calls.does(what)
            return True
        return self._now is None

    def _called(self, function: Any, does: Collection[str]) -> None:
        assert self._now is not None
        takes, retries = "takes" in does, "retries" in does
        if takes and not self._groups:
            return  # No loss waits, and none begins to: a run of one function asks nothing more at each step.
        if "scales" not in does and (takes or not retries):
            # Another function made what it takes.
            for group in self._groups:
                group.waits = group.waits and group.function is None
            return
        group = LossesOfOneScale(None if takes else self._now(), None, id(function))
        group.is_retried = retries and not takes
        if takes and self._groups and self._groups[-1].function == id(function):
            self._groups.pop()  # As each step of a run does.
        self._add(group)

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


@dataclasses.dataclass
class _Recorded:
    """The losses that were scaled since gradients were last unscaled or applied.

    Attributes:
        age: The age of the last one; -1 before the first.
        in_doubt: Whether a tape differentiated one of them, or the scale may have entered the gradients otherwise.
    """

    age: float = -1.0
    in_doubt: bool = False


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
        called: Is called before each call of such a function, with its graph and what it does: "scales" a loss, "takes"
            gradients or ends the step, "retries" and returns gradients that it has taken again.
    """

    def __init__(self, called: Callable[[Any, Collection[str]], None]) -> None:
        self._called = called
        self._seen: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
        self.some_are_unseen = False
        """Whether a function may scale a loss of which `called` does not hear."""

    def does(self, what: str) -> None:
        """Records what the function does that is being traced."""
        graph = outermost_function()
        if replica_count() > 1 or graph is None or not before_each_call(self._look, ("functions seen", id(self))):
            self.some_are_unseen = True
        else:
            self._seen.setdefault(graph, set()).add(what)

    def _look(self, graph: Any) -> None:
        seen = self._seen.get(graph, ())
        if tf.executing_eagerly():
            self._called(graph, seen)
            return
        # Another function calls this one, while it is traced.
        for what in sorted(seen):
            self.does(what)
