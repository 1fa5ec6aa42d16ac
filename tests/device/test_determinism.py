"""A step runs on a GPU where operations have to be deterministic: none of ours has a kernel that refuses."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import traced_steps as steps
from audit import audit
from refusals import refused

import scaler

SLOW = ("probes of all", "unit-scaled", "embedding, accumulate, clip by norm", "clip by value")


@pytest.fixture(autouse=True)
def deterministic(gpu):
    # The fixture that cleans up after each test turns it off again.
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()


@pytest.mark.slow
@pytest.mark.exhaustive_with(*(kind for kind in steps.TRACED if kind not in SLOW))
@pytest.mark.parametrize("kind", steps.TRACED)
def test_steps_of_every_kind(kind):
    step = steps.TRACED[kind]()
    assert refused(step) == []
    # Nor does any of them wait for the host.
    assert kind not in SLOW or audit(step).found == []


def test_two_gradients_of_one_weight_are_added_on_the_device():
    """One of them from an embedding, which a CPU scatters into the other one."""

    @tf.function
    def added(values, indices, dense):
        return scaler.gradients.add(tf.IndexedSlices(values, indices, tf.constant([5, 2])), dense)

    step = added.get_concrete_function(tf.TensorSpec([3, 2]), tf.TensorSpec([3], tf.int64), tf.TensorSpec([5, 2]))
    assert refused(step) == []
    found = step(tf.ones([3, 2]), tf.constant([4, 1, 4], tf.int64), tf.ones([5, 2]))
    np.testing.assert_array_equal(found, [[1, 1], [2, 2], [1, 1], [1, 1], [3, 3]])


def test_what_refuses_is_found():
    """The audit itself. TensorFlow's own functions avoid what refuses, so that most is called by name."""

    def step(x):
        scattered = tf.tensor_scatter_nd_add(x, [[0]], [1.0])
        counts = tf.raw_ops.DenseBincount(input=tf.cast(x, tf.int32), size=4, weights=tf.constant([], tf.int32))
        drawn = tf.raw_ops.RandomStandardNormal(shape=[2], dtype=tf.float32, seed=0, seed2=0)
        loss, _ = tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=x[None], labels=x[None])
        summed = tf.math.unsorted_segment_sum(x, tf.cast(x, tf.int32), 4)
        return scattered, counts, drawn, loss, summed

    found = refused(tf.function(step).get_concrete_function(tf.TensorSpec([4])))
    assert {one.type: one.why for one in found} == {
        "TensorScatterAdd": "runs on the host",
        "DenseBincount": "refuses determinism",
        "RandomStandardNormal": "has no seed",
        "SoftmaxCrossEntropyWithLogits": "refuses determinism",
    }
