"""Optimizer updates compiled by XLA, a few variables to a cluster.

Unscaling, clipping, weight decay, the update and the rounding of masters become a few passes over memory, where
TensorFlow's graph takes one for each operation. Only *how* is decided here, from the variables' sizes: what is computed
is what the optimizer's own `apply` computes, but for the last bits, which XLA rounds differently.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from scaler import gradients
from scaler.backend import apply_steps, replicas
from scaler.backend.graphs import in_xla
from scaler.gate.updates import Optimizer
from scaler.gradients.clipping import Limiter
from scaler.weights.masters import MasterWeights

_HANDLE = 2**12
"""A variable costs as much as so many of its elements, however small it is."""
_WORTH_COMPILING = 2**18
_MOST = 4
"""More clusters than cores gain nothing; a cluster a variable loses to its launch."""


def worth_compiling(optimizer: Optimizer, grads: Sequence, targets: Sequence) -> bool:
    """Whether `update` can do this update, and does it faster than the optimizer's `apply` in the graph."""
    if tf.executing_eagerly() or in_xla() or tf.distribute.has_strategy() or not _compiles(optimizer):
        return False
    if len({id(replicas.native(target)) for target in targets}) < len(targets):
        return False  # What is known of a gradient is known by its variable.
    dense = [target for grad, target in zip(grads, targets, strict=True) if not isinstance(grad, tf.IndexedSlices)]
    return (
        len({replicas.native(target).device for target in targets}) == 1 and sum(map(_cost, dense)) >= _WORTH_COMPILING
    )


def update(
    optimizer: Optimizer,
    grads: Sequence[gradients.Gradient],
    targets: Sequence,
    masters: MasterWeights | None,
    loss_scale: tf.Tensor,
    limit: Limiter | None,
) -> None:
    """Has a Keras optimizer move `targets`, inside a graph and on one device.

    Args:
        optimizer: It was built for the targets.
        grads: Scaled gradients of any floating dtype, without duplicate indices.
        targets: A variable for each.
        masters: Those of the targets, or None. They take over what was assigned to the model first, and are rounded
            into it last.
        loss_scale: Scalar float32; the gradients are multiplied by its reciprocal, which is division for powers of two.
        limit: Clips unscaled gradients, or None.
    """
    inverse = 1.0 / loss_scale
    given = {id(replicas.native(target)): target for target in targets}
    positions = {name: position for position, name in enumerate(given)}

    def finish(grad: tf.Tensor | tf.IndexedSlices, variable: tf.Variable | None = None):
        (unscaled,) = gradients.multiply([grad], inverse)
        return unscaled if limit is None else gradients.limit(unscaled, limit, positions.get(id(variable)))

    def move(pairs: Sequence[tuple], learning_rate: tf.Tensor) -> None:
        variables = [variable for _, variable in pairs]
        if masters:
            masters.refresh(variables)
        getattr(type(optimizer), apply_steps.DECAY)(optimizer, [given[id(variable)] for variable in variables])
        for grad, variable in pairs:
            optimizer.update_step(grad, variable, learning_rate)
        if masters:
            masters.write(variables)

    def compiled(pairs: Sequence[tuple], learning_rate: tf.Tensor) -> None:
        grads, variables = zip(*pairs, strict=True)

        @tf.function(jit_compile=True, autograph=False)
        def cluster(grads: list, learning_rate: tf.Tensor) -> None:
            move([(finish(grad, v), v) for grad, v in zip(grads, variables, strict=True)], learning_rate)

        cluster(list(grads), learning_rate)

    def run(strategy, pairs: Sequence[tuple], learning_rate) -> None:
        del strategy
        learning_rate = tf.convert_to_tensor(learning_rate)
        move([(finish(grad, v), v) for grad, v in pairs if isinstance(grad, tf.IndexedSlices)], learning_rate)
        for cluster in balanced([pair for pair in pairs if not isinstance(pair[0], tf.IndexedSlices)]):
            compiled(cluster, learning_rate)

    done_here = {apply_steps.DECAY: lambda variables: None, apply_steps.SUM: lambda pairs: pairs}
    with apply_steps.taken_over(optimizer, **done_here, **{apply_steps.UPDATE: run}) as taken:
        optimizer.apply(list(grads), list(targets))
    if not all(map(gradients.overwrites, targets)):
        taken.once(apply_steps.UPDATE)
    if masters and (optimizer.ema_overwrite_frequency or any(target.constraint for target in targets)):
        masters.write()  # These have moved the masters once more.


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


def _cost(variable) -> int:
    return variable.shape.num_elements() + _HANDLE


def _compiles(optimizer: Optimizer) -> bool:
    """One of Keras's own, which are tested, whose `apply` does nothing to gradients before the update step."""
    return (
        isinstance(optimizer, keras.optimizers.Optimizer)
        and type(optimizer).__module__.startswith("keras.")
        and not hasattr(optimizer, "optimizers")  # A MultiOptimizer, which has others do the work.
        and not optimizer.gradient_accumulation_steps
        and optimizer.clipnorm is optimizer.clipvalue is optimizer.global_clipnorm is None
        and apply_steps.can_be_compiled(optimizer)
    )
