"""MNIST through Keras's loader, which downloads it once."""

from __future__ import annotations

import keras
import numpy as np

from loops.support.errors import LoopError
from loops.tasks.images import ImageTask


def load() -> ImageTask:
    """MNIST: 60,000 images for training, and 10,000 held out.

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
