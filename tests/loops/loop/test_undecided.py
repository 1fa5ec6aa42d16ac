"""A loss scaler that scales the losses of a run and decides no step of it says so once, and nobody else does."""

import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import one_layer

import loops
import scaler
from loops.loop import silence

LIMIT, MANY, FEW = 10.0, 50, 20
FAR, TOO_HIGH = 2.0**60, scaler.Dynamic(2.0**80, max_scale=2.0**100)
"""A gradient of `FAR` has a finite norm, and overflows at scales above 2^67."""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    assert (silence.UNDECIDED, silence.AT_END) == (1000, 100)
    monkeypatch.setattr(silence, "UNDECIDED", MANY)
    monkeypatch.setattr(silence, "AT_END", FEW)


class Program:
    """One weight, and a step that is written by hand.

    Args:
        when: From the number of the step and the norm to `when=` of `apply`; None for an
            optimizer that gets the scaled gradients itself.
    """

    def __init__(self, when=None, slope=1.0, strategy=None, by_hand=False):
        self.weight, self.count = tf.Variable([1.0]), tf.Variable(0, dtype=tf.int64, trainable=False)
        self.optimizer = keras.optimizers.SGD(1e-3)
        self.optimizer.build([self.weight])
        self.scaler = scaler.LossScaler(strategy or scaler.Dynamic(2.0**10))
        self.when, self.slope, self.by_hand = when, slope, by_hand

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
        outcome = self.scaler.apply(self.optimizer, grads, [self.weight], unscaled=True, when=when)
        return {"loss": loss, "applied": outcome.finite}


def data(steps=None):
    return tf.data.Dataset.from_tensors(tf.ones([2])).repeat(steps)


few_steps = pytest.mark.usefixtures("eagerly")
"""Which need no graph."""


def said(step, steps, at_once=None, **options):
    """The warnings of a run about steps that were not decided."""
    at_once = 1 if tf.config.functions_run_eagerly() else at_once or steps
    loop = loops.Loop(step, data(), steps_per_call=at_once, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.run(steps)
        loop.run(steps + 3)
    return [str(one.message) for one in caught if one.category is scaler.ScaleWarning]


@pytest.mark.parametrize("way", ["graph", "python", "xla", "eager"])
def test_an_optimizer_that_gets_scaled_gradients_is_named(way):
    tf.config.run_functions_eagerly(way == "eager")
    (message,) = said(Program(by_hand=way == "python"), 3, 1 if way == "python" else 3, jit_compile=way == "xla")
    assert message.startswith("The loss scaler scaled losses in the last 3 steps, and no step was decided:")
    assert "pass them to apply(optimizer, grads, variables)" in message


def test_data_that_ends_ends_the_run():
    """Also where the last call takes no step."""
    loop = loops.Loop(Program(), data(4), steps_per_call=2)
    with pytest.warns(scaler.ScaleWarning, match="in the last 4 steps"), pytest.raises(loops.OutOfData):
        loop.run(6)


def test_on_replicas_too():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        step = Program()
    assert len(said(step, 3, strategy=strategy)) == 1


@pytest.mark.parametrize(("steps", "at_once"), [(MANY, 10), (FEW, 500)], ids=["10", "at the end"])
def test_a_limit_that_no_overflow_passes_is_named(steps, at_once):
    """Also at the end of a shorter run."""
    step = Program(lambda count, norm: norm < LIMIT, FAR, TOO_HIGH)
    (message,) = said(step, steps, at_once)
    assert f"in the last {steps:,} steps" in message
    assert "(norm < limit) | ~tf.math.is_finite(norm)" in message
    assert float(step.scaler.loss_scale) == 2.0**80


def test_the_limit_that_the_message_names_leaves_out_large_gradients_alone():
    """Overflows at first, which cost the scale, then a norm that is too large, and then one that is not."""
    step = Program(lambda count, norm: (norm < LIMIT) | ~tf.math.is_finite(norm), FAR, TOO_HIGH)
    assert said(step, 40) == []
    assert (int(step.scaler.counters.attempted), float(step.scaler.loss_scale)) == (13, 2.0**67)
    assert step.weight.numpy() == 1.0
    step.slope = 1.0
    step(None)
    assert int(step.scaler.counters.applied) == 1


def test_a_run_that_stands_still_later_is_named():
    """As after a resume: the attempts of before do not count."""
    step = Program(lambda count, norm: count <= 2)
    for _ in range(2):
        step(None)
    (message,) = said(step, 2 * MANY, 10)
    assert f"in the last {MANY:,} steps" in message


@few_steps
def test_steps_that_are_judged_and_never_counted_are_named():
    step = Program()
    apply, own = step.scaler.apply, step.optimizer
    step.optimizer = types.SimpleNamespace(apply=lambda grads, weights: apply(own, grads, weights, update=False))
    (message,) = said(step, 3)
    assert message.endswith(
        "apply(update=False) leaves the count to update(event), which nothing called: end steps with it."
    )


@few_steps
@pytest.mark.parametrize("known", [False, True])
def test_unscaled_gradients_that_nobody_counts_are_said_once(known):
    """By the visits of a loop that knows the scaler, and at the end of one that does not."""
    step = Program()
    if known:
        step.loss_scaler = step.scaler
    step.optimizer.apply = lambda grads, weights: [
        weight.assign_sub(grad) for weight, grad in zip(weights, step.scaler.unscale(grads), strict=True)
    ]
    (message,) = said(step, 3)
    assert message.startswith("unscale(grads) was used, and no step was ever counted")


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


class Part(Program):
    """Is trained at the first step alone, or not yet; other weights are trained at each."""

    def __init__(self, turn):
        super().__init__(lambda count, norm: True)
        self.turn, self.other, self.steps = turn, tf.Variable([1.0]), tf.Variable(0, trainable=False)

    def __call__(self, x):
        self.steps.assign_add(1)
        self.other.assign_add([1.0])
        return {"loss": tf.cond(self.turn(self.steps), lambda: Program.__call__(self, x)["loss"], lambda: 0.0)}


def accumulating():
    step = loops.TrainStep(one_layer(), keras.losses.MeanSquaredError(), keras.optimizers.SGD(1e-3), accumulate=8)
    return lambda x: step((tf.ones([2, 4]), tf.ones([2, 1])))


@pytest.mark.slow_with("accumulate", "part", "later part")
@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda: Program(lambda count, norm: count % 32 == 0), 32 + FEW - 4),
        (accumulating, 4),
        (lambda: Reading(), MANY + 2),
        (lambda: Evaluation(), MANY + 2),
        (lambda: Part(lambda steps: steps == 1), MANY + 2),
        (lambda: Part(lambda steps: steps > 500), MANY + 2),
    ],
    ids=["windows", "accumulate", "logs", "evaluation", "part", "later part"],
)
def test_nothing_is_said_of_others(make, steps):
    assert said(make(), steps) == []


def test_a_run_that_applied_few_steps_says_so_at_its_end():
    """And not one that is a step shorter, or has a step more applied."""
    step = loops.TrainStep(
        one_layer(), lambda y, p: tf.reduce_mean(tf.sqrt(p * p * y)), "sgd", loss_scaler=scaler.Dynamic()
    )
    no_gradient, no_loss = (1.0, 0.0), (np.nan, 1.0)  # The square root has a slope of infinity at zero.
    runs = {
        (silence.SKIPPED - 1, 0, no_gradient): None,
        (silence.SKIPPED, 0, no_gradient): "none of its 20 attempted steps was applied.",
        (silence.SHORT, 15, no_gradient): None,
        (silence.SHORT, 14, no_gradient): "only 14 of its 50 attempted steps were applied.",
        (silence.BAD - 1, 0, no_loss): None,
        (silence.BAD, 0, no_loss): "none of its 5 attempted steps was applied.",
    }
    values = [(1.0, 1.0) if at < sound else bad for steps, sound, bad in runs for at in range(steps)]
    data = tf.data.Dataset.from_tensor_slices(values).map(lambda xy: (tf.fill([2, 4], xy[0]), tf.fill([2, 1], xy[1])))
    loop, goal = loops.Loop(step, data, steps_per_call=10), 0
    for (steps, _, bad), expected in runs.items():
        goal += steps
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", scaler.StuckWarning)
            loop.run(goal)
        messages = [str(one.message) for one in found if issubclass(one.category, scaler.StuckWarning)]
        assert len(messages) == (expected is not None)
        why = "the loss itself" if bad is no_loss else "the backward pass overflow"
        assert all(f"{expected} The step was skipped because {why}" in one for one in messages)
