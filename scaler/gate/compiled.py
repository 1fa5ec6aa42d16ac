"""An optimizer's update compiled by XLA, a few variables to a call.

Unscaling, clipping, weight decay, the update and the rounding of masters become a few passes over memory, where
TensorFlow's graph takes one pass for each operation. Whether it is worth it depends on the variables' sizes. The result
is that of the optimizer's own `apply`, except for the last bits, which XLA rounds differently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from scaler import gradients
from scaler.backend import apply_steps, replicas
from scaler.backend.graphs import in_xla
from scaler.gate.optimizers import Optimizer
from scaler.gate.targets import model_follows
from scaler.gate.unscale_and_clip import finish
from scaler.gradients.clipping import Limiter
from scaler.weights.masters import MasterWeights

_HANDLE = 2**12
"""What a variable costs beside its elements, in elements: each is read through a handle, however small it is."""
_WORTH_COMPILING = 2**18
_MOST = 4
"""Calls of one update. More calls than cores run no faster, and the launch of a call for each variable takes longer
than its work."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A Keras optimizer moves variables in compiled calls, inside a graph and on one device.

    Attributes:
        optimizer: It was built for the variables.
        variables: One for each gradient.
        masters: What the variables are masters for, or None.
    """

    optimizer: Optimizer
    variables: Sequence
    masters: MasterWeights | None

    def move(self, grads: Sequence, loss_scale: tf.Tensor, limit: Limiter | None) -> None:
        """Moves the variables.

        Keras's `apply` does all that surrounds the update, such as the count of steps and moving averages, and calls
        `step` for the update itself.

        Args:
            grads: Scaled gradients of any floating dtype, without duplicate indices.
            loss_scale: Scalar float32. The gradients are multiplied by its reciprocal, which is exact for powers of
                two.
            limit: Clips unscaled gradients, or None.
        """
        inverse = 1.0 / loss_scale
        positions = {id(replicas.native(variable)): position for position, variable in enumerate(self.variables)}

        def move_some(grads: Sequence, variables: Sequence, learning_rate: tf.Tensor) -> None:
            places = [positions[id(variable)] for variable in variables]
            pairs = zip(grads, places, strict=True)
            finished = [finish(g, lambda one: gradients.multiply(one, inverse), limit, place) for g, place in pairs]
            with model_follows(self.masters, variables):
                self._decay([self.variables[place] for place in places])
                for grad, variable in zip(finished, variables, strict=True):
                    self.optimizer.update_step(grad, variable, learning_rate)

        def step(strategy: Any, pairs: Sequence[tuple], learning_rate: Any) -> None:
            del strategy
            learning_rate = tf.convert_to_tensor(learning_rate)
            sparse = [pair for pair in pairs if isinstance(pair[0], tf.IndexedSlices)]
            move_some(*_unzipped(sparse), learning_rate)
            for group in balanced([pair for pair in pairs if not isinstance(pair[0], tf.IndexedSlices)]):
                _in_one_call(move_some, *_unzipped(group), learning_rate)

        done_in_step = {apply_steps.DECAY: lambda variables: None, apply_steps.SUM: lambda pairs: pairs}
        with apply_steps.taken_over(self.optimizer, **done_in_step, **{apply_steps.UPDATE: step}) as calls:
            self.optimizer.apply(list(grads), list(self.variables))
        if not all(map(gradients.overwrites, self.variables)):
            apply_steps.check_called_once(calls, apply_steps.UPDATE)
            if self.optimizer.weight_decay:
                apply_steps.check_called_once(calls, apply_steps.DECAY)
        if self.masters and self._moves_masters_after_the_step():
            self.masters.write()

    def _decay(self, variables: list) -> None:
        getattr(type(self.optimizer), apply_steps.DECAY)(self.optimizer, variables)

    def _moves_masters_after_the_step(self) -> bool:
        return bool(self.optimizer.ema_overwrite_frequency) or any(variable.constraint for variable in self.variables)


def worth_compiling(optimizer: Optimizer, grads: Sequence, variables: Sequence) -> bool:
    """Whether a `Compiled` can do this update, and does it faster than the optimizer's `apply` in the graph."""
    if tf.executing_eagerly() or in_xla() or tf.distribute.has_strategy() or not _compiles(optimizer):
        return False
    if len({id(replicas.native(variable)) for variable in variables}) < len(variables):
        return False  # Keras passes pairs to `step`, where a gradient's position is known by its variable.
    dense = [
        variable for grad, variable in zip(grads, variables, strict=True) if not isinstance(grad, tf.IndexedSlices)
    ]
    one_device = len({replicas.native(variable).device for variable in variables}) == 1
    return one_device and sum(map(_cost, dense)) >= _WORTH_COMPILING


def balanced(pairs: Sequence[tuple]) -> list[list[tuple]]:
    """The pairs of gradient and variable in a few groups of about the same cost."""
    count = max(1, min(_MOST, sum(_cost(variable) for _, variable in pairs) // _WORTH_COMPILING))
    groups: list[list[tuple]] = [[] for _ in range(count)]
    costs = [0] * count
    for pair in sorted(pairs, key=lambda pair: _cost(pair[1]), reverse=True):
        cheapest = costs.index(min(costs))
        groups[cheapest].append(pair)
        costs[cheapest] += _cost(pair[1])
    return [group for group in groups if group]


def _in_one_call(move: Callable[..., None], grads: Sequence, variables: Sequence, learning_rate: tf.Tensor) -> None:
    @tf.function(jit_compile=True, autograph=False)
    def compiled_update(grads: list, learning_rate: tf.Tensor) -> None:
        move(grads, variables, learning_rate)

    compiled_update(list(grads), learning_rate)


def _unzipped(pairs: Sequence[tuple]) -> tuple[list, list]:
    return [grad for grad, _ in pairs], [variable for _, variable in pairs]


def _cost(variable: Any) -> int:
    return variable.shape.num_elements() + _HANDLE


def _compiles(optimizer: Optimizer) -> bool:
    """Whether it is one of Keras's own, which are tested, and its `apply` leaves gradients alone before the update."""
    return (
        isinstance(optimizer, keras.optimizers.Optimizer)
        and type(optimizer).__module__.startswith("keras.")
        and not hasattr(optimizer, "optimizers")  # A MultiOptimizer, which has others do the work.
        and not optimizer.gradient_accumulation_steps
        and optimizer.clipnorm is optimizer.clipvalue is optimizer.global_clipnorm is None
        and apply_steps.can_be_compiled(optimizer)
    )
