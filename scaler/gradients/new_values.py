"""New values in the place of gradients: they count in nothing, and several of one variable in one step become one."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from scaler.backend.autograph import no_autograph
from scaler.gradients.lists import Gradient, overwrites


@no_autograph
def derivatives(grads: Sequence[Gradient], variables: Sequence) -> list[Gradient]:
    """The gradients, with None in the place of those that are their variable's new value: what a norm may count.

    Args:
        grads: Tensors, `tf.IndexedSlices` or None.
        variables: The variable of each.
    """
    return [None if overwrites(own) else grad for grad, own in zip(grads, variables, strict=True)]


@no_autograph
def largest(values: tf.Tensor) -> tf.Tensor:
    """The largest of several new values of one variable, element by element.

    The variables that take their gradient as their value hold magnitudes: the scales of Keras's float8 layers and the
    largest values of their last steps. What holds for a whole batch is the largest of its parts. Keras takes it, too,
    over the micro-batches of a window: `_overwrite_variables_directly_with_gradients` in its `base_optimizer.py`.

    Args:
        values: Of a floating dtype, [n, ...].

    Returns:
        Of that dtype, [...]. An element that is infinite or NaN in one of the parts is not finite.
    """
    # A maximum would lose a NaN, or a negative infinity.
    finite = tf.reduce_all(tf.math.is_finite(values), axis=0)
    return tf.where(finite, tf.reduce_max(values, axis=0), tf.reduce_sum(values, axis=0))
