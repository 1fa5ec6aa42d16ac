"""Guards that a skip is explained with the names of its own variables, also if a scaler has several `apply`."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import modes

import scaler

NAN, BIG = np.float32(np.nan), np.float32(1e36)


class Parts:
    """A body of two weights and a head, each with its optimizer, and one scaler."""

    def __init__(self, head=None):
        self.loss_scaler = scaler.LossScaler(stuck=scaler.StuckPolicy(consecutive_skips=2))
        self.body = [keras.Variable([1.0], name=name) for name in ("body_kernel", "body_bias")]
        self.head = [keras.Variable([1.0], name="head_kernel")]
        self.optimizers = [keras.optimizers.SGD(0.1), head or keras.optimizers.Adam(0.1)]

    def step(self, body, head):
        variables = [*self.body, *self.head]
        with tf.GradientTape() as tape:
            scaled = self.loss_scaler.scale(tf.add_n([tf.reduce_sum(variable.value) for variable in variables]))
        grads = tape.gradient(scaled, [variable.value for variable in variables])
        first = self.loss_scaler.apply(self.optimizers[0], [grads[0], grads[1] * body], self.body)
        second = self.loss_scaler.apply(self.optimizers[1], [grads[2] * head], self.head)
        return first, second


@modes("eager", "graph", "xla")
def test_the_variable_of_the_skip_is_named(execute):
    parts = Parts()
    run = execute(parts.step)
    for factors, name in (((NAN, 1.0), "body_bias"), ((1.0, NAN), "head_kernel"), ((NAN, 1.0), "body_bias")):
        outcomes = run(*map(np.float32, factors))
        assert f"gradient of {name!r}" in parts.loss_scaler.explain()
        skipped = next(outcome for outcome in outcomes if not bool(outcome.finite))
        assert parts.loss_scaler.explain(skipped) == parts.loss_scaler.explain()
        assert int(parts.loss_scaler.last_skip.index) == int(skipped.index)
        assert int(parts.loss_scaler.last_skip.names_from) == int(skipped.names_from)
        applied = next(outcome for outcome in outcomes if bool(outcome.finite))
        assert parts.loss_scaler.explain(applied).startswith("The step was applied")


def test_the_error_names_it():
    parts = Parts()
    run = tf.function(parts.step)
    parts.loss_scaler.stuck = scaler.StuckPolicy(consecutive_skips=1)
    run(np.float32(1.0), NAN)
    with pytest.raises(scaler.StuckError, match="head_kernel"):
        parts.loss_scaler.check()


def test_the_optimizer_of_the_skip_is_named():
    parts = Parts()
    parts.optimizers[1].learning_rate = np.nan
    tf.function(parts.step)(np.float32(1.0), np.float32(1.0))
    assert "the learning rate of Adam" in parts.loss_scaler.explain()
    assert int(parts.loss_scaler.last_skip.index) == -1


def test_a_checkpoint_keeps_whose_it_was(tmp_path):
    parts = Parts()
    run = tf.function(parts.step)
    run(np.float32(1.0), NAN)
    said = parts.loss_scaler.explain()
    path = tf.train.Checkpoint(loss_scaler=parts.loss_scaler).save(str(tmp_path / "ckpt"))
    run(NAN, np.float32(1.0))
    assert parts.loss_scaler.explain() != said
    tf.train.Checkpoint(loss_scaler=parts.loss_scaler).restore(path).assert_consumed()
    assert parts.loss_scaler.explain() == said


def test_the_names_of_an_apply_are_kept_once():
    parts = Parts()
    for _ in range(3):
        parts.step(np.float32(1.0), NAN)
    tf.function(parts.step)(NAN, np.float32(1.0))
    assert len(parts.loss_scaler._names.beginnings) == 2
