"""Guards that a loss scaler goes into another process as it is: fresh, after steps, with every kind of strategy."""

import pickle

import pytest
import tensorflow as tf
from ways import graph

import scaler
from scaler.strategies import Bounded, Scheduled, Warmup

STRATEGIES = {
    "dynamic": scaler.Dynamic(1024.0, growth_interval=2),
    "warmup": Warmup(scaler.Dynamic(1024.0, growth_interval=2), steps=3),
    "scheduled": Scheduled({0: scaler.Static(8.0), 2: scaler.Dynamic(1024.0, growth_interval=2)}),
    "bounded": Bounded(scaler.presets.pytorch(growth_interval=2), 1.0, 2.0**20),
}


def stepping(loss_scaler, variable, traced):
    def step(factor):
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(factor * tf.reduce_sum(tf.square(variable)))
        grads = loss_scaler.unscale(tape.gradient(scaled, [variable]))
        loss_scaler.apply(lambda g, v: v[0].assign_sub(0.125 * g[0]), grads, [variable], unscaled=True)

    return graph(step) if traced else step


@pytest.mark.parametrize(
    ("strategy", "traced"),
    [("warmup", False), ("scheduled", False), ("dynamic", True), ("bounded", None)],
)
def test_a_copy_goes_on_as_the_original(strategy, traced):
    loss_scaler, variable = scaler.LossScaler(STRATEGIES[strategy]), tf.Variable([1.0, 2.0])
    if traced is not None:
        stepping(loss_scaler, variable, traced)(tf.constant(1.0))
    copy, other = pickle.loads(pickle.dumps(loss_scaler)), tf.Variable(variable)
    for own, weight in ((loss_scaler, variable), (copy, other)):
        step = stepping(own, weight, traced=False)
        for factor in (1.0, float("inf"), 1.0):
            step(tf.constant(factor))
    assert type(copy.state).__name__ == type(loss_scaler.state).__name__
    assert [float(value) for value in copy.state] == [float(value) for value in loss_scaler.state]
    assert [int(count) for count in copy.counters] == [int(count) for count in loss_scaler.counters]
    assert other.numpy().tolist() == variable.numpy().tolist()


def test_a_copy_is_saved_and_restored(tmp_path):
    loss_scaler = scaler.LossScaler(STRATEGIES["bounded"])
    stepping(loss_scaler, tf.Variable([1.0]), traced=False)(tf.constant(float("inf")))
    copy = pickle.loads(pickle.dumps(loss_scaler))
    names = []
    for own in (loss_scaler, copy):
        path = tf.train.Checkpoint(s=own).write(str(tmp_path / "state"))
        names.append(tf.train.list_variables(path))
        fresh = scaler.LossScaler(STRATEGIES["bounded"])
        tf.train.Checkpoint(s=fresh).read(path).assert_consumed()
        assert [float(value) for value in fresh.state] == [float(value) for value in loss_scaler.state]
        assert int(fresh.counters.skipped) == 1
    assert names[0] == names[1]
