"""No step copies a tensor between a GPU and its host, by TensorFlow's list of kernels: every strategy, all weights."""

import keras
import pytest
import tensorflow as tf
from audit import audit

import loops
import scaler
from scaler.backend import bits, kernels
from scaler.errors import UnsupportedVersion

STRATEGIES = {
    "dynamic": scaler.Dynamic,
    "headroom": scaler.Headroom,
    "histogram": scaler.Histogram,
    "log_normal": scaler.LogNormal,
    "delayed_amax": scaler.DelayedAmax,
    "smooth": scaler.Smooth,
    "none": scaler.NoScaling,
}
WEIGHTS = {
    "masters": scaler.MasterWeights,
    "stochastic": scaler.weights.StochasticRounding,
    "kahan": scaler.weights.KahanWeights,
}
BATCH = tf.zeros([32, 64]), tf.zeros([32], tf.int32)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """What is traced is for a GPU."""
    monkeypatch.setattr(bits, "has_gpu", lambda: True)


def model(policy):
    keras.config.set_dtype_policy(policy)
    hidden = [keras.layers.Dense(128, "relu"), keras.layers.BatchNormalization(dtype="float32")]
    return keras.Sequential([keras.Input([64]), *hidden, keras.layers.Dense(10, dtype="float32")])


def audited(step):
    return audit(tf.function(step).get_concrete_function(BATCH))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_of_every_strategy(strategy):
    optimizer = keras.optimizers.Adam(1e-3)
    made = loops.TrainStep(
        model("mixed_float16"), LOSS, optimizer, loss_scaler=scaler.LossScaler(STRATEGIES[strategy]())
    )
    found, predicates = audited(made)
    assert found == []
    assert predicates == (1 if strategy == "none" else 2)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_step_of_every_kind_of_weights(weights):
    made = model("float16")
    masters, optimizer = WEIGHTS[weights](made.trainable_variables), keras.optimizers.Adam(1e-3)
    loss_scaler = scaler.LossScaler()

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(LOSS(y, made(x, training=False)))
        return loss_scaler.apply(optimizer, tape.gradient(scaled, made.trainable_variables), masters).finite

    found, predicates = audited(step)
    assert found == []
    assert predicates == 2


@pytest.mark.parametrize(
    ("options", "optimizer", "wanted"),
    [
        ({"clip_norm": 1.0}, keras.optimizers.Adam, 2),
        ({"accumulate": 4, "clip_norm": 1.0}, keras.optimizers.Adam, 9),
        ({}, keras.optimizers.Adafactor, 4),
    ],
    ids=["clipped", "accumulated", "an optimizer that is looked at"],
)
def test_clipping_windows_and_updates_that_are_looked_at(options, optimizer, wanted):
    made = loops.TrainStep(model("mixed_float16"), LOSS, optimizer(1e-3), loss_scaler=scaler.LossScaler(), **options)
    found, predicates = audited(made)
    assert found == []
    assert predicates == wanted


def test_what_leaves_the_device_is_found():
    """The audit itself: int32 arithmetic, an operation without a kernel, Python, and a branch."""

    def step(batch):
        x, _ = batch
        largest = tf.reduce_max(tf.bitcast(x, tf.int32))
        places = tf.argmax(tf.cast(x, tf.int32), axis=1)
        told = tf.py_function(lambda value: value, [x], tf.float32)
        return tf.cond(largest > 0, lambda: places, lambda: tf.zeros([32], tf.int64)), told

    found, predicates = audited(step)
    assert {one.type.partition("(")[0]: one.why for one in found} == {
        "Max": "in host memory int32(32, 64)",
        "ArgMax": "no GPU kernel int32(32, 64)",
        "EagerPyFunc": "runs on the host",
    }
    assert predicates == 1


def test_a_release_that_does_not_list_kernels_is_said_to_be_one(monkeypatch):
    from tensorflow.python.framework import kernels as listed

    monkeypatch.delattr(listed, "get_registered_kernels_for_op")
    with pytest.raises(UnsupportedVersion, match="does not list the kernels"):
        kernels.gpu_kernels("Add")
