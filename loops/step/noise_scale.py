"""What the gradient noise scale is computed from, measured in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import scaler

PARTS = ("noise", "signal")
"""What a step measures: the two estimates whose ratio is the noise scale."""


class NoiseScale(tf.Module):
    """Estimates of the gradient's noise and of its signal, from gradients of two batch sizes.

    McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", arXiv:1812.06162, appendix A.1. One replica's
    micro-batch of b examples has the gradient g, and all n of a step together G. Then

        signal = (n |G|^2 - |g|^2) / (n - 1)          estimates the squared norm of the true gradient,
        noise = b n (|g|^2 - |G|^2) / (n - 1)         the trace of the covariance of one example's gradient.

    |g|^2 is its mean over the micro-batches. Over replicas, too, since outputs are averaged over them and both are
    linear in it. Each is unbiased, and noisy: a signal may be below 0. The ratio of their means over many steps is the
    simple noise scale, the batch size above which more examples help little.

    Args:
        micro_batches: How many a step has on each replica.
        replicas: How many there are.

    Raises:
        scaler.InvalidArgument: For one micro-batch on one replica.
    """

    def __init__(self, micro_batches: int, replicas: int):
        super().__init__(name="noise_scale")
        self._micro_batches, self._parts = micro_batches, micro_batches * replicas
        if self._parts == 1:
            raise scaler.InvalidArgument(
                "observe.watch(kinds=['noise_scale']): the gradient noise scale compares gradients of two batch sizes, "
                "and this step has one micro-batch on one replica: expected TrainStep(accumulate=2) or more, "
                "ComposedStep(forward=..., accumulate=2) or more, or a strategy with several replicas."
            )
        self._sum: tf.Variable | None = None
        if micro_batches > 1:
            with tf.init_scope():
                self._sum = tf.Variable(
                    0.0,
                    trainable=False,
                    name="sum_of_squared_norms",
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                )

    def measured(
        self, grads: Sequence, loss_scale: tf.Tensor, x: Any, attempted: tf.Tensor, grad_norm: tf.Tensor
    ) -> tf.Tensor:
        """Noise and signal, float32 [2]; NaN unless this call ended a step whose gradients are finite.

        Args:
            grads: This micro-batch's scaled gradients of its share of the mean loss.
            loss_scale: Their scale.
            x: The micro-batch's inputs.
            attempted: Whether the call ended a step, scalar bool.
            grad_norm: The norm of the step's unscaled gradient.
        """
        own = scaler.gradients.unscale([grad for grad in grads if grad is not None], loss_scale / self._parts)
        small = 2.0 * tf.add_n([tf.nn.l2_loss(tf.cast(_values(grad), tf.float32)) for grad in own])
        if self._sum is not None:
            total = self._sum + small
            self._sum.assign(tf.where(attempted, 0.0, total))
            small = total / self._micro_batches
        large, parts = tf.square(grad_norm), float(self._parts)
        noise = tf.cast(_size(x), tf.float32) * parts * (small - large) / (parts - 1)
        found = tf.stack([noise, (parts * large - small) / (parts - 1)])
        return tf.where(tf.reduce_all(tf.math.is_finite(found)), found, float("nan"))


def _values(grad: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def _size(x: Any) -> tf.Tensor:
    """The number of examples in a batch of inputs."""
    first = tf.nest.flatten(x)[0]
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    return first.dense_shape[0] if isinstance(first, tf.SparseTensor) else tf.shape(first)[0]
