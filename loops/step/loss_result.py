"""What a loss function returned: a loss or a `WeightedLoss`, alone or with a dict of scalars by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any, NamedTuple

import tensorflow as tf

from loops.support.errors import BadBatch, BadOutputs


@dataclasses.dataclass(frozen=True)
class WeightedLoss:
    """A loss as a sum and what it is to be divided by: tokens, examples that a mask leaves, or sample weights.

        def loss_fn(y, logits):
            mask = tf.cast(y != PADDING, tf.float32)
            each = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            return loops.WeightedLoss(tf.reduce_sum(each * mask), tf.reduce_sum(mask))

    A `TrainStep` divides the sum of the totals by the sum of the weights, over the micro-batches of a window and over
    replicas: the gradient is that of one large batch. A mean of means is not, where micro-batches differ in weight.
    Keras's `compile` takes no such loss: it raises an error.

    Attributes:
        total: Scalar, the sum over the batch, each term times its weight.
        weight: Scalar, the sum of the weights, at least 0. A batch with a weight of 0 counts for nothing.
    """

    # No tuple: Keras would take the mean of the two. TensorFlow's functions may return it all the same.
    total: Any
    weight: Any

    def __tf_flatten__(self) -> tuple[tuple, tuple]:
        """Nothing fixed, and two tensors."""
        return (), (self.total, self.weight)

    @classmethod
    def __tf_unflatten__(cls, metadata: tuple, components: tuple) -> WeightedLoss:
        """The loss again."""
        del metadata
        return cls(*components)


class Loss(NamedTuple):
    """What a loss function returned, read.

    Attributes:
        mean: The loss, of a `WeightedLoss` the total over the weight, in float32.
        shown: What a look at the loss's precision is to see: a total in 16 bits in place of the mean.
        weight: Of a `WeightedLoss`, scalar float32; else None.
        extra: Further scalars by name.
    """

    mean: tf.Tensor
    shown: tf.Tensor
    weight: tf.Tensor | None
    extra: dict[str, tf.Tensor]


def read_loss(result: Any, taken: Container[str]) -> Loss:
    """The loss, and the scalars that its function returned with it.

    Args:
        result: What the function returned.
        taken: Names that the step itself returns.

    Raises:
        BadBatch: If the loss is one of no rows.
        BadOutputs: If it returned something else, or a scalar with a name that is taken.
    """
    pair = isinstance(result, tuple) and len(result) == 2
    loss, extra = result if pair else (result, {})
    weighted = isinstance(loss, WeightedLoss)
    if not isinstance(extra, dict) or (not weighted and isinstance(loss, (tuple, list, dict))) or loss is None:
        raise BadOutputs(
            f"the loss function returned {result!r}: expected a scalar or an hs.WeightedLoss(total, weight), alone "
            "or with a dict of scalars by name."
        )
    if not weighted and tf.TensorShape(getattr(loss, "shape", ())) == tf.TensorShape([0]):
        raise BadBatch(
            "the batch has no rows: Keras's losses give no scalar for it, but an empty tensor. Leave such batches out "
            "of what gives them. As a batch of a tf.data.Dataset with an open number of rows, such as (None, 6), it "
            "is a step with a loss of 0."
        )
    twice = [name for name in extra if name in taken]
    if twice:
        raise BadOutputs(
            f"the loss function returned a scalar named {twice[0]!r}, which the step itself returns: rename it."
        )
    return _of_weighted(loss, extra) if weighted else Loss(loss, loss, None, extra)


def _of_weighted(loss: WeightedLoss, extra: dict[str, tf.Tensor]) -> Loss:
    for name, value in vars(loss).items():
        shape = getattr(value, "shape", ())
        if isinstance(value, (tuple, list, dict, str)) or value is None or tf.TensorShape(shape).rank not in (0, None):
            raise BadOutputs(
                f"the loss function returned a WeightedLoss with {name}={value!r}: expected a scalar, the sum over the "
                "batch. Use tf.reduce_sum."
            )
    weight = tf.cast(loss.weight, tf.float32)
    # A weight below 0, infinite or NaN makes the loss NaN, and the step a skip.
    sound = tf.logical_and(tf.math.is_finite(weight), weight >= 0.0)
    divisor = tf.where(sound, positive(weight), float("nan"))
    mean = tf.cast(loss.total, tf.float32) / divisor
    total = tf.convert_to_tensor(loss.total)
    return Loss(mean, total if total.dtype in (tf.float16, tf.bfloat16) else mean, weight, extra)


def share_of_weight(weight: tf.Tensor) -> tf.Tensor:
    """What a replica's mean counts for in a mean over replicas, scalar float32: 1 where all have the same weight.

    Args:
        weight: This replica's, scalar float32.
    """
    return tf.distribute.get_strategy().num_replicas_in_sync * weight / positive(sum_over_replicas(weight))


def sum_over_replicas(weight: tf.Tensor | tf.Variable) -> tf.Tensor:
    """The sum of a number that each replica has."""
    context: Any = tf.distribute.get_replica_context()
    weight = tf.identity(weight)
    return context.all_reduce(tf.distribute.ReduceOp.SUM, weight) if context.num_replicas_in_sync > 1 else weight


def positive(weight: tf.Tensor) -> tf.Tensor:
    """A sum of weights to divide by; 1 in place of 0, where nothing was summed."""
    return tf.where(tf.equal(weight, 0.0), 1.0, weight)
