"""TensorFlow's advice, which is meant for whoever writes a step and not for whoever looks at one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Keeps TensorFlow from warning of functions that are traced again and again, each time with something changed."""
    logger = tf.get_logger()
    before = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(before)
