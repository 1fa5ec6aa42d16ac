"""Strategies on logical CPUs, one for each number of replicas and as many more as a process makes, and their values."""

import functools
import itertools

import tensorflow as tf


class _KeysOfItsOwn:
    """A base of collective keys that no other strategy of the process has."""

    def __init__(self):
        self._bases = itertools.count(0, 100_000)

    def __get__(self, strategy, owner=None):
        return next(self._bases)


def let_strategies_follow_each_other():
    """Lets a process make several strategies, as a run of many tests does.

    Every `MirroredStrategy` counts its keys from the same number, so that a second one in a process fails with "Shape
    mismatch in the collective instance" or "joining a group with size". TensorFlow's own tests set the base, too.
    """
    tf.distribute.MirroredStrategy._collective_key_base = _KeysOfItsOwn()


@functools.cache
def mirrored(replicas):
    """One strategy for each number of replicas, made once."""
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])


def one_for_each(strategy, values):
    """A value of which each replica has its own: that of its number."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )
