"""Guards that a run restored from a checkpoint goes on as if it had never stopped: scale, counters, masters, slots."""

import keras
import numpy as np
import tensorflow as tf
from rigs import raw
from scaler_cases import slots
from ways import graph

import scaler

WORD = "1101110010111011111101001"
STOPS = 0, 7, 20


class Run:
    """One float16 weight vector, trained on gradients that depend on it and are spoiled at the zeros of `WORD`."""

    def __init__(self, strategy):
        self.variable = tf.Variable(tf.constant([1.0, -2.0], tf.float16))
        self.masters = scaler.MasterWeights([self.variable])
        self.optimizer = keras.optimizers.Adam(0.1)
        self.optimizer.build(self.masters.weights)
        self.loss_scaler = scaler.LossScaler(strategy, select=True)  # Traced sooner than branches.
        self.checkpoint = tf.train.Checkpoint(
            variable=self.variable, masters=self.masters, optimizer=self.optimizer, loss_scaler=self.loss_scaler
        )
        self.step = graph(self._step)

    def _step(self, spoil):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.cast(self.variable, tf.float32))) * spoil
            scaled = self.loss_scaler.scale(loss)
        return self.loss_scaler.apply(self.optimizer, tape.gradient(scaled, [self.variable]), self.masters)

    def go(self, word):
        """Runs the word and returns every bit of the state after each step."""
        trace = []
        for letter in word:
            outcome = self.step(np.float32(1 if letter == "1" else np.nan))
            state = [value.numpy() for value in (*self.loss_scaler.state, *self.loss_scaler.counters)]
            bits = raw([self.variable], self.masters.weights, slots(self.optimizer))
            trace.append([bool(outcome.finite), outcome.loss_scale.numpy(), *state, *bits])
        return trace


def test_a_run_restored_at_any_step_continues_the_trace(tmp_path):
    strategy = scaler.Dynamic(64.0, growth_interval=3, hysteresis=2)
    whole = Run(strategy)
    paths, trace = {}, []
    for number, letter in enumerate(WORD):
        if number in STOPS:
            paths[number] = whole.checkpoint.write(str(tmp_path / f"step-{number}"))
        trace += whole.go(letter)
    resumed = Run(strategy)
    for stop in STOPS:
        resumed.checkpoint.read(paths[stop]).assert_consumed()
        assert resumed.go(WORD[stop:]) == trace[stop:]


def test_the_scaler_alone_is_saved_whole(tmp_path):
    saved = scaler.LossScaler(scaler.Dynamic(8.0, hysteresis=3))
    for finite in (True, True, False, True):
        saved.update(scaler.Event(tf.constant(finite)))
    path = tf.train.Checkpoint(loss_scaler=saved).save(str(tmp_path / "ckpt"))
    loaded = scaler.LossScaler(scaler.Dynamic(1024.0, hysteresis=3))
    tf.train.Checkpoint(loss_scaler=loaded).restore(path).assert_consumed()
    assert [float(x) for x in loaded.state] == [float(x) for x in saved.state] == [8.0, 1.0, 2.0]
    assert [int(x) for x in loaded.counters] == [int(x) for x in saved.counters] == [4, 3, 1, 0]
