"""1,797 real handwritten digits of 8x8 pixels, from scikit-learn without a download."""

from __future__ import annotations

import numpy as np

from loops.support.errors import LoopError
from loops.tasks.images import ImageTask

_TEST_SHARE = 0.2


def load() -> ImageTask:
    """The digits, a fifth of them held out by a fixed shuffle.

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
