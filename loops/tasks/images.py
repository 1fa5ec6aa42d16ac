"""Classification of small greyscale images in ten classes: the dataset and the network for `digits` and `mnist`."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from loops.support.errors import LoopError

_TEST_SHARE = 0.2


@dataclasses.dataclass(frozen=True)
class ImageTask:
    """A classification task, with everything that a run needs.

    Attributes:
        name: The task's name on the command line.
        images: The training images, float32 [n, height, width, 1], in [0, 1].
        labels: Their labels, int32 [n], in [0, 10).
        test_images: The held-out images.
        test_labels: Their labels.
        learning_rate: A suitable learning rate for Adam.
        batch_size: A suitable batch size.
    """

    name: str
    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    learning_rate: float = 1e-2
    batch_size: int = 64

    def dataset(self, batch_size: int, seed: int) -> tf.data.Dataset:
        """Endless batches `(images, labels)`, reshuffled in each epoch in an order determined by `seed`."""
        data = tf.data.Dataset.from_tensor_slices((self.images, self.labels)).cache()
        data = data.shuffle(len(self.images), seed=seed, reshuffle_each_iteration=True).repeat()
        return ahead(data.batch(batch_size, drop_remainder=True))

    def model(self, policy: str) -> keras.Model:
        """A convolutional network with BatchNorm, built under a Keras dtype policy; it returns logits in float32.

        Args:
            policy: "float32", "mixed_float16", "mixed_bfloat16", "float16" or "bfloat16".
        """

        def block(filters: int, **arguments: Any) -> list:
            return [
                keras.layers.Conv2D(filters, 3, padding="same", use_bias=False, dtype=policy, **arguments),
                keras.layers.BatchNormalization(momentum=0.9, dtype=policy),
                keras.layers.ReLU(dtype=policy),
            ]

        return keras.Sequential(
            [
                keras.layers.Input(self.images.shape[1:]),
                *block(16),
                *block(32, strides=2),
                *block(32, strides=2),
                keras.layers.Flatten(dtype=policy),
                keras.layers.Dense(10, dtype=policy),
                keras.layers.Activation("linear", dtype="float32"),
            ],
            name=self.name,
        )

    def loss(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        """Mean cross-entropy in nats, scalar float32."""
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels, tf.int32), tf.cast(logits, tf.float32))
        return tf.reduce_mean(losses)

    def scores(self, model: keras.Model) -> dict[str, float]:
        """`accuracy`."""
        return {"accuracy": self.accuracy(model)}

    def accuracy(self, model: keras.Model) -> float:
        """The share of the held-out images that the model classifies correctly. An output that is NaN is wrong."""
        logits = np.asarray(model.predict(self.test_images, batch_size=512, verbose=0), np.float32)
        right = (logits.argmax(axis=1) == self.test_labels) & np.isfinite(logits).all(axis=1)
        return float(right.mean())


def digits() -> ImageTask:
    """1,797 real handwritten digits of 8x8 pixels, a fifth of them held out by a fixed shuffle.

    Raises:
        LoopError: If scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise LoopError('the digits come with scikit-learn: pip install "halfstep[study]"') from error
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(labels))
    images = (pixels / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)[order]
    labels = labels.astype(np.int32)[order]
    held_out = int(len(labels) * _TEST_SHARE)
    return ImageTask("digits", images[held_out:], labels[held_out:], images[:held_out], labels[:held_out])


def mnist() -> ImageTask:
    """MNIST through Keras's loader, which downloads it once: 60,000 images for training, and 10,000 held out.

    Raises:
        LoopError: If it is not in Keras's cache and cannot be downloaded.
    """
    try:
        (images, labels), (test_images, test_labels) = keras.datasets.mnist.load_data()
    except Exception as error:  # Keras raises a bare Exception for a failed download.
        raise LoopError(
            f"MNIST could not be downloaded ({error}). Put mnist.npz into ~/.keras/datasets, or use the task digits, "
            "which needs no download."
        ) from error
    return ImageTask(
        "mnist", _pixels(images), labels.astype(np.int32), _pixels(test_images), test_labels.astype(np.int32)
    )


def _pixels(images: np.ndarray) -> np.ndarray:
    return (images / 255.0).astype(np.float32)[..., np.newaxis]


def ahead(batches: tf.data.Dataset) -> tf.data.Dataset:
    """The same batches, with the next two ready.

    tf.data's tuning thread is off: there is nothing else to tune, and an iterator that has one takes up to two seconds
    to be deleted.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return batches.prefetch(2).with_options(options)
