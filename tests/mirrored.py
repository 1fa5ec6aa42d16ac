"""Strategies on logical CPUs, one for each number of replicas in a process."""

import functools
import unittest.mock

import tensorflow as tf


@functools.cache
def mirrored(replicas):
    """One strategy for each number of replicas, on its own collective keys.

    Every `MirroredStrategy` counts its keys from the same number, so that a second one in a process fails with "Shape
    mismatch in the collective instance" or "joining a group with size". TensorFlow's own tests set the base, too.
    """
    with unittest.mock.patch.object(tf.distribute.MirroredStrategy, "_collective_key_base", replicas * 100_000):
        return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
