"""A loss scaler that scales the losses of a run and decides no step of it says so once, and nobody else does."""

import warnings

import keras
import pytest
import tensorflow as tf
from models import plain_model

import loops
import scaler
from loops.loop.undecided import FEW, MANY

LIMIT = 10.0
FAR = 2.0**100
"""A gradient of `FAR` is finite, and infinite once it is multiplied by a scale of 2^40."""


class Program:
    """One weight, and a step that is written by hand.

    Args:
        when: From the number of the step and the norm to `when=` of `apply`; None for an optimizer that gets the scaled
            gradients itself.
    """

    def __init__(self, when=None, slope=1.0, strategy=None, by_hand=False, **options):
        self.weight, self.count = tf.Variable([1.0]), tf.Variable(0, dtype=tf.int64, trainable=False)
        self.optimizer = keras.optimizers.SGD(1e-3)
        self.optimizer.build([self.weight])
        self.scaler = scaler.LossScaler(strategy or scaler.Dynamic(2.0**10))
        self.when, self.slope, self.by_hand, self.options = when, slope, by_hand, options

    def __call__(self, x):
        self.count.assign_add(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.weight) * self.slope
            scaled = loss * self.scaler.loss_scale if self.by_hand else self.scaler.scale(loss)
        grads = tape.gradient(scaled, [self.weight])
        if self.when is None:
            self.optimizer.apply(grads, [self.weight])
            return {"loss": loss}
        grads = self.scaler.unscale(grads)
        when = self.when(self.count, tf.linalg.global_norm(grads))
        outcome = self.scaler.apply(self.optimizer, grads, [self.weight], unscaled=True, when=when, **self.options)
        return {"loss": loss, "applied": outcome.finite}


def data(steps=None):
    return tf.data.Dataset.from_tensors(tf.ones([2])).repeat(steps)


def said(step, steps, at_once=None, **options):
    """The warnings of a run about steps that were not decided."""
    loop = loops.Loop(step, data(), steps_per_call=at_once or steps, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.run(steps)
        loop.run(steps + 3)
    found = [one for one in caught if "no step was decided" in str(one.message)]
    assert all(one.category is scaler.ScaleWarning for one in found)
    return [str(one.message) for one in found]


@pytest.mark.parametrize("way", ["graph", "python", "xla", "eager", "by hand"])
def test_an_optimizer_that_gets_scaled_gradients_is_named(way):
    step = Program(by_hand=way == "by hand")
    tf.config.run_functions_eagerly(way == "eager")
    try:
        (message,) = said(step, 3, 1 if way in ("python", "eager") else 3, jit_compile=way == "xla")
    finally:
        tf.config.run_functions_eagerly(False)
    assert message.startswith("The loss scaler scaled losses in the last 3 steps, and no step was decided:")
    assert "pass them to apply(optimizer, grads, variables)" in message


def test_on_replicas_too():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        step = Program()
    assert len(said(step, 3, strategy=strategy)) == 1


@pytest.mark.parametrize("at_once", [100, 5000])
def test_a_limit_that_no_overflow_passes_is_named(at_once):
    step = Program(lambda count, norm: norm < LIMIT, FAR, scaler.Dynamic(2.0**40))
    (message,) = said(step, MANY, at_once)
    assert f"in the last {MANY:,} steps" in message
    assert "(norm < limit) | ~tf.math.is_finite(norm)" in message
    assert float(step.scaler.loss_scale) == 2.0**40


def test_also_at_the_end_of_a_shorter_run():
    step = Program(lambda count, norm: norm < LIMIT, FAR, scaler.Dynamic(2.0**40))
    assert len(said(step, FEW)) == 1


def test_the_limit_that_the_message_names_leaves_out_large_gradients_alone():
    """Overflows at first, then a norm that is too large, and the weight moves at neither."""
    step = Program(lambda count, norm: (norm < LIMIT) | ~tf.math.is_finite(norm), FAR, scaler.Dynamic(2.0**40))
    assert said(step, 30) == []
    assert float(step.scaler.loss_scale) < 2.0**28
    assert int(step.scaler.counters.skipped) == int(step.scaler.counters.attempted) > 12
    assert step.weight.numpy() == 1.0
    step.slope = 1.0
    assert said(lambda x: step(x), 30) == []
    assert int(step.scaler.counters.applied) == 33


@pytest.mark.parametrize("before", [0, 5])
def test_a_run_that_stands_still_later_is_named(before):
    """As after a resume: the attempts of before do not count."""
    step = Program(lambda count, norm: count <= 5)
    for _ in range(before):
        step(None)
    messages = said(step, MANY + 5, 5)
    assert len(messages) == 1
    assert f"in the last {MANY:,} steps" in messages[0]


def test_steps_that_are_judged_and_never_counted_are_named():
    step = Program(lambda count, norm: True, update=False)
    (message,) = said(step, 3)
    assert message.endswith("Steps with apply(update=False) end with update(event).")


def test_unscaled_gradients_that_nobody_counts_are_said_once():
    step = Program()
    step.optimizer.apply = lambda grads, weights: [
        weight.assign_sub(grad) for weight, grad in zip(weights, step.scaler.unscale(grads), strict=True)
    ]
    with pytest.warns(scaler.ScaleWarning, match="no step was ever counted"):
        assert said(step, 3) == []


class Reading(Program):
    """Trains without the scaler, and logs its scale."""

    def __call__(self, x):
        self.optimizer.apply([tf.ones([1])], [self.weight])
        return {"loss_scale": self.scaler.loss_scale}


class Evaluation(Program):
    """Shares a loss with training."""

    def __call__(self, x):
        self.count.assign_add(1)
        return {"loss": self.scaler.scale(tf.reduce_sum(self.weight)) / self.scaler.loss_scale}


class Rarely(Program):
    """A part whose turn comes at the first step alone, or not yet."""

    def __call__(self, x):
        self.weight.assign_add([1.0])
        turn = Program.__call__
        return tf.cond(self.when(self.count, None), lambda: turn(self, x)["loss"], lambda: self.count.assign_add(1) and 0.0)


def accumulating():
    model = plain_model()
    step = loops.TrainStep(model, keras.losses.MeanSquaredError(), keras.optimizers.SGD(1e-3), accumulate=8)
    return lambda x: step((tf.ones([2, 4]), tf.ones([2, 1])))


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda: Program(lambda count, norm: count % 64 == 0), 20),
        (lambda: Program(lambda count, norm: count % 64 == 0), 127),
        (accumulating, 4),
        (lambda: Reading(), 200),
        (lambda: Evaluation(), 200),
    ],
    ids=["window", "windows", "accumulate", "logs", "evaluation"],
)
def test_nothing_is_said_of_others(make, steps):
    assert said(make(), steps) == []


@pytest.mark.parametrize("first", [1, 10**6], ids=["before", "not yet"])
def test_nothing_is_said_of_a_part_whose_turn_is_another_time(first):
    step = Rarely(lambda count, norm: count % first == (1 if first == 1 else 0) * 0 + (0))
    assert step is not None
