"""`protect` knows the optimizers of a model wherever it holds them: what one has applied stays where another skips."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from rigs import raw

import scaler

X, ONES = np.ones([4, 2], np.float32), np.ones([4, 1], np.float32)


class Two(keras.Model):
    """Two networks, each with an optimizer. `where` says what holds the second, `wrapped` whether it is ours.

    The first column of a batch's factors multiplies the first loss, the second column the second one.
    """

    def __init__(self, where, wrapped=True):
        super().__init__()
        self.one = keras.layers.Dense(2, use_bias=False)
        self.other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        self.one.build((None, 2))
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")
        self.built = True
        self.first = scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), scaler.Static(64.0))
        second = keras.optimizers.SGD(0.1, momentum=0.9)
        if wrapped:
            second = scaler.LossScaleOptimizer(second, scaler.Static(64.0))
        if where == "compiled":
            self.other.compile(second, jit_compile=False)
        elif where == "list":
            self.several = [second]
        elif where == "dict":
            self.several = {"second": [second]}
        elif where == "layer":
            self.one.optimizer = second
        self.second = lambda: second

    def train_step(self, data):
        x, factors = data[:2]
        self.steps.assign_add(1.0)
        with tf.GradientTape(persistent=True) as tape:
            loss = self.first.scale_loss(tf.reduce_mean(self.one(x) * factors[:, :1]))
            other = self.second().scale_loss(tf.reduce_mean(self.other(x) * factors[:, 1:]))
        for net, scaled, optimizer in ((self.one, loss, self.first), (self.other, other, self.second())):
            weights = net.trainable_variables
            optimizer.apply(tape.gradient(scaled, weights), weights)
        return {"loss": loss}


def two(where, protect=True, wrapped=True, **mode):
    keras.utils.set_random_seed(3)
    model = Two(where, wrapped)
    if not wrapped:
        model.second().scale_loss = lambda loss: loss
    model.compile(**(mode or {"jit_compile": False}))
    return scaler.protect(model) if protect else model


def learnt(model):
    slots = [model.first.inner_optimizer, getattr(model.second(), "inner_optimizer", model.second())]
    return raw(model.trainable_variables), [raw(each.variables) for each in slots]


def factors(first, second):
    return np.concatenate([ONES * first, ONES * second], 1)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "wrapped"), [("dict", True), ("compiled", False)], ids=["ours", "of Keras"])
def test_what_one_has_applied_stays_where_the_other_skips(where, wrapped):
    """Without `protect` a skip moves no weight and no slot, and leaves those of the other optimizer alone."""
    model, alone = (two(where, protect, wrapped) for protect in (True, False))
    for each in (model, alone):
        each.train_on_batch(X, factors(1.0, 1.0))
        each.train_on_batch(X, factors(np.nan, 1.0))
    assert int(model.first.loss_scaler.counters.skipped) == 1
    assert int(model.second().iterations) == 2
    assert learnt(model) == learnt(alone)


@pytest.mark.slow_with("list")
@pytest.mark.parametrize("where", ["compiled", "list"])
def test_a_skip_of_the_second_puts_the_state_back(where):
    model = two(where)
    model.train_on_batch(X, factors(1.0, 1.0))
    model.train_on_batch(X, factors(1.0, np.nan))
    assert [int(model.first.iterations), int(model.second().iterations)] == [2, 1]
    assert float(model.steps) == 1.0


@pytest.mark.parametrize("mode", [{"jit_compile": False}, {"run_eagerly": True}], ids=str)
def test_an_optimizer_that_cannot_be_found_is_refused_before_it_moves_anything(mode):
    model = two("nowhere", **mode)
    before = raw(model.other.variables)
    with pytest.raises(scaler.InvalidArgument, match=r"did not find before the step.*an attribute of the model"):
        model.train_on_batch(X, factors(1.0, 1.0))
    assert raw(model.other.variables) == before


@pytest.mark.slow_with("ours")
@pytest.mark.parametrize("kind", [lambda inner: inner, scaler.LossScaleOptimizer], ids=["keras", "ours"])
def test_a_teacher_that_was_trained_before_is_put_back(kind):
    """Its optimizer, which is still compiled with it, does not run in this step."""

    class Following(keras.Model):
        def __init__(self, teacher):
            super().__init__()
            self.student, self.teacher = keras.layers.Dense(1), teacher
            self.student.build((None, 2))
            self.built = True

        def train_step(self, data):
            x, y = data[:2]
            with tf.GradientTape() as tape:
                loss = self.optimizer.scale_loss(tf.reduce_mean((self.student(x) - y) ** 2))
            weights = self.student.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            for weight, average in zip(self.student.variables, self.teacher.variables, strict=True):
                average.assign(0.5 * average + 0.5 * weight)
            return {}

    teacher = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    teacher.compile(kind(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=False)
    teacher.train_on_batch(X, ONES)
    model = Following(teacher)
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1)), jit_compile=False)
    scaler.protect(model)
    model.train_on_batch(X, ONES)
    before = raw(teacher.variables)
    model.train_on_batch(X, ONES * np.nan)
    assert raw(teacher.variables) == before
    model.train_on_batch(X, ONES)
    assert raw(teacher.variables) != before


class Frozen(keras.Model):
    """A discriminator that is frozen for the generator, and trained by a step that names its weights."""

    def __init__(self):
        super().__init__()
        self.parts = {name: keras.layers.Dense(1) for name in ("first", "second")}
        for part in self.parts.values():
            part.build([None, 2])
        self.several = [scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)) for _ in range(2)]
        self.parts["first"].trainable = False
        self.built = True

    def train_step(self, data):
        x, factors = data[:2]
        for number, (part, optimizer) in enumerate(zip(self.parts.values(), self.several, strict=True)):
            weights = [part.kernel, part.bias]
            with tf.GradientTape() as tape:
                tape.watch([weight.value for weight in weights])
                loss = optimizer.scale_loss(tf.reduce_mean(part(x)) * factors[0, number])
            optimizer.apply(tape.gradient(loss, [weight.value for weight in weights]), weights)
        return {}


def test_weights_of_a_frozen_layer_that_a_step_trains_by_name_stay_applied():
    model = Frozen()
    model.compile(jit_compile=False)
    scaler.protect(model)
    x = np.ones((4, 2), np.float32)
    model.train_on_batch(x, np.float32([[1.0, 1.0]] * 4))
    before = {name: raw([part.kernel, part.bias]) for name, part in model.parts.items()}
    model.train_on_batch(x, np.float32([[1.0, np.inf]] * 4))
    assert raw([model.parts["first"].kernel, model.parts["first"].bias]) != before["first"]
    assert raw([model.parts["second"].kernel, model.parts["second"].bias]) == before["second"]
    assert [int(one.loss_scaler.counters.applied) for one in model.several] == [2, 1]


def test_that_of_a_model_inside_alone_does_not_make_a_step_safe():
    """A model may be inside for its weights alone, with the optimizer that once trained it."""
    base = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    base.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD()))
    model = keras.Sequential([keras.Input((2,)), base])
    model.compile("sgd", loss="mse", jit_compile=False)
    with pytest.raises(scaler.InvalidArgument, match=r"has no hs\.LossScaleOptimizer"):
        scaler.protect(model).train_on_batch(X, ONES)
