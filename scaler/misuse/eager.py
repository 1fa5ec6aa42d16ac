"""The scale that gradients carry in eager mode, where there is no graph to ask: a record of each step.

A step is scaled, a tape differentiates its losses, and its gradients are taken: unscaled, or applied to variables. The
calls tell this in their order. A gradient is younger than the tape that made it, and older than later ones. A function
that was traced before scales losses and takes gradients each time it is called, too.

A tape that differentiates a scaled loss passes through it. If none did, the gradients are not those of it. They may
still carry the scale if they were computed without a tape, or in a function, or if the user multiplied by the scale:
then nothing is said. A false alarm is worse than a miss.
"""

from __future__ import annotations

import dataclasses
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.assignments import age_of
from scaler.backend.graphs import before_each_call, outermost_function, tape_records
from scaler.errors import InvalidArgument
from scaler.misuse.carried import KEEP_UNSCALED, Carried, of_one_retry, retried_elsewhere

_MOST = 32
"""The most steps that are remembered."""
_NEVER = float("inf")


@dataclasses.dataclass(eq=False)
class _Step:
    """Losses that one scale multiplied, until their gradients are taken.

    Attributes:
        scales: Those that its gradients may carry: of the losses, and of a retry. Empty if only the scaler knows.
        finite: Whether all losses were finite. None if it is not known.
        begun: The age of the first loss.
        function: Which function scales the losses; None for eager mode.
        losses: Those that were differentiated, by their age.
        served: The variables that were updated, by id.
        is_over: Whether nothing of it will be taken any more.
        is_retried: Whether a function took its gradients again, at a scale that is not known.
    """

    scales: list[float]
    finite: tf.Tensor | None
    begun: float
    function: int | None = None
    losses: set[float] = dataclasses.field(default_factory=set)
    served: frozenset[int] = frozenset()
    is_over: bool = False
    is_retried: bool = False

    def waits_for(self, variables: frozenset[int]) -> bool:
        """Whether gradients of it may still be applied to some of these variables; to any, if none is named."""
        return not self.is_over and not (variables and variables <= self.served)


class EagerSteps:
    """The steps of one loss scaler in eager mode.

    An `apply` to some variables takes, for these alone, all losses that its gradients may come from; but all of a step
    with a single loss.

    A call of a function that scales a loss and returns its gradients is a step. So is one of a function that also
    applies them, but nothing waits for its gradients, and its scale is that of the last loss.

    Args:
        now: Returns the scale that multiplies the next loss. None if it never moves, and nothing has to be known.
    """

    def __init__(self, now: Callable[[], tf.Tensor] | None) -> None:
        self._now = now
        self._steps: list[_Step] = []
        self._passes: list[tuple[float, _Step]] = []
        """When gradients of a step began to be made. Those that follow each other are one."""
        self._functions: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
        """What functions do: "scales" a loss, "takes" gradients or ends the step, "retries"."""
        self._some_are_unseen = self._in_functions = False
        self._undifferentiated = -1.0
        """The age of the last loss since gradients were taken; infinity if one of them may have been differentiated."""
        self._differentiable: weakref.WeakSet[Callable] = weakref.WeakSet()
        """The backward functions of these losses: a tape keeps each for as long as it can be differentiated."""

    def __reduce__(self) -> tuple:
        # A copy in another process knows no function.
        return EagerSteps, (self._now,)

    def scales(self, loss_scale: tf.Tensor, finite: tf.Tensor) -> None:
        """Records that a loss is scaled, or that a function which is traced scales one."""
        if self._leaves_to_functions("scales"):
            return
        last = self._steps[-1] if self._steps else None
        if last is None or last.is_over or last.served or last.scales != [float(loss_scale)]:
            self._add(_Step([float(loss_scale)], finite, age_of(finite)))
        elif last.finite is not None:
            last.finite = tf.logical_and(last.finite, finite)

    def scaled(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the last loss that was scaled, with the same gradient, which tells when a tape passes through it."""
        if not tf.executing_eagerly():
            self._in_functions = True
            return loss
        if not tape_records():
            self.differentiated()
            return loss
        step, age = self._steps[-1] if self._steps else None, age_of(loss)

        @tf.custom_gradient
        def passed(value: tf.Tensor) -> tuple:
            def backward(upstream: tf.Tensor) -> tf.Tensor:
                self._passed(step, age)
                return tf.identity(upstream)

            self._differentiable.add(backward)
            return tf.identity(value), backward

        result = passed(loss)
        if self._undifferentiated < _NEVER:
            self._undifferentiated = age_of(result)
        return result

    def broke_off(self) -> bool:
        """Forgets the losses of an open step if none was differentiated, nor can be: it broke off. Whether it did."""
        if not (tf.executing_eagerly() and 0.0 <= self._undifferentiated < _NEVER) or self._differentiable:
            return False
        self._undifferentiated = -1.0
        if self._steps:
            self._steps[-1].is_over = True
        return True

    def differentiated(self) -> None:
        """Records that the gradients of the last loss are made without a tape, or of a loss that was scaled by hand."""
        is_known = self._steps and tf.executing_eagerly()
        self._passed(self._steps[-1] if is_known else None, _age_now())

    def _passed(self, step: _Step | None, loss: float) -> None:
        """Records that gradients of a loss, which is given by its age, are made from now on."""
        self._undifferentiated = _NEVER
        if step is None:
            return
        if loss not in step.losses:
            step.losses.add(loss)
            # An `apply` before it took the gradients of another loss.
            step.is_over = step.is_over and not step.served
        if not self._passes or self._passes[-1][1] is not step:
            self._passes.append((_age_now(), step))

    def not_scaled(self, method: str, grads: Sequence[gradients.Gradient]) -> str | None:
        """Records that gradients are unscaled or applied.

        Args:
            method: Who takes them.
            grads: The gradients.

        Returns:
            A warning if they certainly come from none of the losses that were scaled since the last call, else None.
        """
        if not tf.executing_eagerly():
            return None
        last, self._undifferentiated = self._undifferentiated, -1.0
        # A gradient that is older is kept from before.
        if last < 0.0 or self._in_functions or not all(last < age_of(one) < _NEVER for one in _values(grads)):
            return None
        return (
            f"{method}(grads): the gradients are divided by the loss scale, but no tape has differentiated what "
            "scale(loss) (scale_loss of a LossScaleOptimizer) returned: they seem to be gradients of the unscaled "
            "loss, and the step would be too small by this factor. Differentiate the result: "
            "tape.gradient(scale(loss), variables)."
        )

    def carried(
        self, method: str, grads: Sequence, variables: Sequence | None, used: tf.Tensor, owner: object
    ) -> Carried | None:
        """What gradients carry of their losses. None if nothing is known of them, and they carry the value of `used`.

        Args:
            method: Who asks, for the errors.
            grads: The gradients.
            variables: What they are applied to, if it is known.
            used: The scale of the last loss.
            owner: The `Calls` of the loss scaler.

        Raises:
            InvalidArgument: If they may carry several scales.
        """
        # A new value of a variable may be older than the loss.
        grads = grads if variables is None else gradients.derivatives(grads, variables)
        retried = of_one_retry(method, _values(grads), owner)
        if retried is not None:
            return retried
        if self._some_are_unseen and self._steps and float(tf.convert_to_tensor(used)) not in self._steps[-1].scales:
            self._steps, self._passes = [], []
        wanted = _ids(variables)
        sources: set[_Step] = set()
        for made in self._made_before(grads):
            # One that is as a tape returned it belongs to the last loss that the tape passed.
            sources.update([step for step in made if step.waits_for(wanted)], made[-1:])
        steps = [step for step in self._steps if step in sources]
        if any(step.is_retried for step in steps):
            raise retried_elsewhere(method)
        scales = list(dict.fromkeys(scale for step in steps for scale in step.scales))
        if len(scales) > 1:
            raise InvalidArgument(
                f"{method}(grads): several losses were scaled that were not applied yet, and the loss scale moved "
                f"between them. These gradients may carry a scale of {' or '.join(f'{one:g}' for one in scales)}: "
                "expected gradients of one scale. Apply or unscale the gradients of a loss before the next one is "
                "scaled, or put the step into a tf.function, which knows the loss of each gradient. "
                f"{KEEP_UNSCALED}"
            )
        known = [step for step in steps if step.scales]
        return Carried(tf.constant(scales[0]), known[-1].finite) if known else None

    def _made_before(self, grads: Iterable) -> list[list[_Step]]:
        """The steps that gradients may belong to, the last one last: once for all between two passes, oldest first."""
        ages = {bisect_left(self._passes, (age,)): age for age in sorted(map(age_of, _values(grads)))}
        # Where no tape is known to have made it, as of a gradient by hand, any loss that is older may have.
        return [
            [step for _, step in self._passes[:place]] or [step for step in self._steps if step.begun < age]
            for place, age in ages.items()
        ]

    def retries(self, grads: Sequence, loss_scale: tf.Tensor, lower: tf.Tensor) -> None:
        """Records that gradients were taken again: those of their losses now carry one scale or the other."""
        if not self._leaves_to_functions("retries"):
            for step in {step for made in self._made_before(grads) for step in made}:
                if float(loss_scale) in step.scales and float(lower) not in step.scales:
                    step.scales.append(float(lower))

    def takes(self, grads: Sequence, variables: Sequence | None = None) -> None:
        """Records that gradients were unscaled, or applied to variables, or that a function does so."""
        if self._leaves_to_functions("takes"):
            return
        made, served = (self._made_before(grads) or [[]])[-1], _ids(variables)
        for step in made:
            step.served |= served
            step.is_over = step.is_over or variables is None or (step is made[-1] and len(step.losses) == 1)

    def ends(self, finite: tf.Tensor) -> None:
        """Records that `update` ends a step: no gradient of any loss will be applied if it was not finite."""
        if not self._leaves_to_functions("takes") and not bool(finite):
            for step in self._steps:
                step.is_over = True

    def _leaves_to_functions(self, what: str) -> bool:
        """Whether the scale never moves, or this is a function that is traced, of which it records what it does."""
        if self._now is not None and not tf.executing_eagerly():
            graph, key = outermost_function(), ("functions seen", id(self))
            if replicas.replica_count() > 1 or graph is None or not before_each_call(self._called, key):
                self._some_are_unseen = True
            else:
                self._functions.setdefault(graph, set()).add(what)
            return True
        return self._now is None

    def _called(self, function: Any) -> None:
        """Records that a function is called, or that another one calls it, while that is traced."""
        does, name = self._functions.get(function, ()), id(function)
        if not tf.executing_eagerly():
            for what in sorted(does):
                self._leaves_to_functions(what)
            return
        takes = "takes" in does
        if takes and not self._steps:
            return  # No loss waits, and none begins to: a run of one function asks nothing more at each step.
        assert self._now is not None
        if takes and "scales" not in does:
            # Another function made what it takes.
            for step in self._steps:
                step.is_over = step.is_over or step.function is not None
            return
        scales = [] if takes else [float(self._now())]
        last = self._steps[-1] if self._steps else None
        # Micro-batches are several calls of one function.
        if last is None or (last.function, last.scales, last.is_over) != (name, scales, takes) or last.served:
            last = _Step(scales, None, _age_now(), name, is_over=takes, is_retried="retries" in does and not takes)
            self._add(last)
        self._passed(last, 0.0)
        last.is_over = takes

    def _add(self, step: _Step) -> None:
        if len(self._steps) >= _MOST:
            gone = next((one for one in self._steps if one.is_over), self._steps[0])
            self._steps.remove(gone)
            heir = self._steps[0]
            if gone.is_over:
                passes = [(age, one) for age, one in self._passes if one is not gone]
            else:
                # Which of their scales a gradient carries is then unknown.
                heir.scales = list(dict.fromkeys(heir.scales + gone.scales))[:2]
                heir.finite, heir.served, heir.begun = None, heir.served & gone.served, gone.begun
                passes = [(age, heir if one is gone else one) for age, one in self._passes]
            self._passes = [next(alike) for _, alike in groupby(passes, key=itemgetter(1))]
        self._steps.append(step)


def _values(grads: Iterable) -> list[tf.Tensor]:
    return [gradients.values_of(grad) for grad in grads if tf.is_tensor(grad)]


def _age_now() -> float:
    with tf.init_scope():  # What traces a function computes its gradients later.
        return age_of(tf.identity(tf.constant(True)))


def _ids(variables: Iterable[Any] | None) -> frozenset[int]:
    return frozenset(id(replicas.native(variable)) for variable in variables or ())
