"""Silences TensorFlow's advice about tracing, which is meant for the author of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Silences TensorFlow's warning about functions that are retraced often: a diagnosis retraces on purpose."""
    logger = tf.get_logger()
    before = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(before)
