"""Batches that are read ahead of the step."""

from __future__ import annotations

import tensorflow as tf


def ahead(batches: tf.data.Dataset) -> tf.data.Dataset:
    """The same batches, with the next two ready.

    tf.data's tuning thread is off: there is nothing else to tune, and an iterator that has one takes up to two seconds
    to be deleted.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return batches.prefetch(2).with_options(options)
