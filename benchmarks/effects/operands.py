"""What the gradients of a convolutional network's kernels are products of, and what a step along some gradient does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

_PROGRESS = 0.01
"""The share of the loss that a step along the exact gradient is to take away, to first order."""

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def convolutions(model: keras.Sequential) -> list[keras.layers.Conv2D]:
    """The convolutions of a model, in order."""
    return [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]


def of_kernels(
    model: keras.Sequential, loss: Loss, images: tf.Tensor, labels: tf.Tensor
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The operands of each convolution's kernel gradient, in training.

    Args:
        model: Layers in a row. Its convolutions have no bias, and pad as "same".
        loss: Of labels and outputs.
        images: [batch, height, width, channels].
        labels: [batch].

    Returns:
        For each convolution what each position sees, float32 [n, kernel * channels], and the gradient of its output
        there, [n, filters], where n is the number of examples times positions. The gradient of the kernel is the sum
        over n of their products.
    """
    convolved = convolutions(model)
    inputs, outputs, given = [], [], images
    with tf.GradientTape() as tape:
        for layer in model.layers:
            if layer in convolved:
                inputs.append(given)
            given = layer(given, training=True) if isinstance(layer, keras.layers.BatchNormalization) else layer(given)
            if layer in convolved:
                outputs.append(given)
        value = loss(labels, given)
    deltas = tape.gradient(value, outputs)
    found = []
    for layer, seen, delta in zip(convolved, inputs, deltas, strict=True):
        patches = tf.image.extract_patches(seen, [1, *layer.kernel_size, 1], [1, *layer.strides, 1], [1] * 4, "SAME")
        found.append(tuple(each.numpy().reshape(-1, each.shape[-1]) for each in (patches, delta)))
    return found


def gradients(model: keras.Sequential, loss: Loss, images: tf.Tensor, labels: tf.Tensor) -> list[np.ndarray]:
    """The gradients of the convolutions' kernels in training, each [kernel * channels, filters]."""
    kernels = [layer.kernel for layer in convolutions(model)]
    with tf.GradientTape() as tape:
        value = loss(labels, model(images, training=True))
    found = tape.gradient(value, [kernel.value for kernel in kernels])
    return [each.numpy().reshape(-1, each.shape[-1]) for each in found]


def progress(
    model: keras.Sequential,
    loss: Loss,
    images: tf.Tensor,
    labels: tf.Tensor,
    exact: Sequence[np.ndarray],
    summed: Mapping[tuple[str, str], Sequence[np.ndarray]],
) -> dict[tuple[str, str], float]:
    """How much a step along each gradient lowers the loss, as a share of what one along the exact gradient does.

    Args:
        model: The network; the kernels of its convolutions move, and are put back.
        loss: Of labels and outputs.
        images: A batch.
        labels: Its labels.
        exact: The gradients of the kernels, each [kernel * channels, filters].
        summed: The same from other sums.
    """
    kernels = [layer.kernel for layer in convolutions(model)]
    before = [keras.ops.convert_to_numpy(kernel) for kernel in kernels]
    start = float(loss(labels, model(images, training=True)))
    rate = _PROGRESS * start / sum(float((each.astype(np.float64) ** 2).sum()) for each in exact)

    def lowered(gradients: Sequence[np.ndarray]) -> float:
        for kernel, old, gradient in zip(kernels, before, gradients, strict=True):
            kernel.assign(old - rate * gradient.reshape(old.shape))
        return start - float(loss(labels, model(images, training=True)))

    best = lowered(exact)
    found = {case: lowered(sums) / best for case, sums in summed.items()}
    for kernel, old in zip(kernels, before, strict=True):
        kernel.assign(old)
    return found
