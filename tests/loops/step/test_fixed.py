"""Guards that a compiled step refuses what was changed since it was traced, in place of ignoring it."""

import keras
import pytest
import tensorflow as tf
from models import batch, one_layer, squared_error
from rigs import raw

import loops
import scaler

SGD = keras.optimizers.SGD
DATA = tuple(map(tf.constant, batch()))


def dense(units):
    return keras.layers.Dense(units, use_bias=False)


def nested():
    """A model whose first layer is a model of two layers."""
    inner = keras.Sequential([keras.Input([4]), dense(4), dense(4)])
    return keras.Sequential([keras.Input([4]), inner, dense(1)]), inner


def add(model):
    model.add(keras.layers.ReLU())


def swap(model):
    model.pop()
    add(model)


def of_layers(model, *layers):
    """Gives a model the layers that it had."""
    while model.layers:
        model.pop()
    for layer in layers:
        model.add(layer)


def called_twice(step):
    call = tf.function(step)
    call(DATA)
    call(DATA)
    return call


@pytest.fixture(scope="module")
def alone():
    """A step of a model with another inside of it, and its compiled function."""
    model, inner = nested()
    step = loops.TrainStep(model, squared_error, SGD(0.1))
    return step, inner, called_twice(step)


LAYERS_ARE = "the model's layers"
CHANGES = {
    "head": (rf"{LAYERS_ARE} \(without 'dense\w*', with 're_lu\w*'\)", lambda step, inner: swap(step.model)),
    "add": (rf"{LAYERS_ARE} \(with 're_lu\w*'\)", lambda step, inner: add(inner)),
    "pop": (rf"{LAYERS_ARE} \(without 'dense\w*'\)", lambda step, inner: inner.pop()),
    "swap": (rf"{LAYERS_ARE} \(without 'dense\w*', with 're_lu\w*'\)", lambda step, inner: swap(inner)),
    "model": (
        rf"{LAYERS_ARE} .+, model \(.+\)",
        lambda step, inner: setattr(step, "model", nested()[0]),
    ),
    "optimizer": ("optimizer", lambda step, inner: setattr(step, "optimizer", SGD(0.0))),
    "loss_fn": ("loss_fn", lambda step, inner: setattr(step, "loss_fn", lambda y, p: squared_error(y, p))),
    "loss_scaler": ("loss_scaler", lambda step, inner: setattr(step, "loss_scaler", scaler.LossScaler())),
    "clip_norm": ("clip_norm", lambda step, inner: setattr(step, "clip_norm", 1e-9)),
    "clip": ("clip", lambda step, inner: setattr(step, "clip", scaler.ClipByValue(1.0))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_trace_is_refused_with_its_name(alone, change):
    (step, inner, call), (what, make) = alone, CHANGES[change]
    settings = {
        name: getattr(step, name) for name in ("model", "optimizer", "loss_fn", "loss_scaler", "clip_norm", "clip")
    }
    layers = [(model, *model.layers) for model in (inner, step.model)]
    weights = step.model.variables
    before = raw(weights)
    make(step, inner)
    try:
        with pytest.raises(scaler.InvalidArgument, match=rf"traced: {what}\. "):
            call(DATA)
        assert raw(weights) == before
    finally:
        for name, value in settings.items():
            setattr(step, name, value)
        for one in layers:
            of_layers(*one)


class Composed:
    """Two parts that take turns, the second with a model inside and a teacher, and a model that only a loss calls."""

    def __init__(self):
        self.model, self.inner = nested()
        (self.teacher, self.inner_of_teacher), (self.critic, self.inner_of_critic) = nested(), nested()
        self.plain = keras.Sequential([keras.Input([4]), dense(1)])
        parts = [
            loops.Part("plain", self.plain, self.plain_loss, SGD(0.1)),
            loops.Part("student", self.model, self.loss, SGD(0.1), teacher=self.teacher),
        ]
        self.step = loops.ComposedStep(parts)

    def plain_loss(self, given):
        return squared_error(given[1], self.plain(given[0]))

    def loss(self, given):
        return squared_error(self.critic(given[0]), self.model(given[0]))


SETTINGS = {
    "retry": lambda step: setattr(step, "retry", True),
    "accumulate": lambda step: setattr(step, "accumulate", 2),
    "forward": lambda step: setattr(step, "forward", lambda given: given),
    "parts": lambda step: setattr(step, "parts", step.parts[:1]),
    "loss_scaler": lambda step: setattr(step, "loss_scaler", scaler.LossScaler()),
    "scalers": lambda step: step.scalers.update(plain=scaler.LossScaler()),
    "optimizers": lambda step: step.optimizers.update(plain=SGD(0.0)),
}


@pytest.fixture(scope="module")
def traced():
    """A composed step and its compiled function, which are put back as they were after each test."""
    own = Composed()
    return own, called_twice(own.step)


@pytest.mark.parametrize("what", SETTINGS)
def test_a_composed_step_refuses_settings_compiled_or_not(traced, what):
    (own, call), step = traced, traced[0].step
    before = {name: getattr(step, name) for name in ("parts", "forward", "loss_scaler", "accumulate", "retry")}
    named = {name: dict(getattr(step, name)) for name in ("scalers", "optimizers")}
    weights = raw(own.model.variables)
    SETTINGS[what](step)
    try:
        with pytest.raises(scaler.InvalidArgument, match=rf"traced: {what}\. "):
            call(DATA)
        with pytest.raises(scaler.InvalidArgument, match=rf"made: {what}\. "):
            step(DATA)
    finally:
        for name, value in {**before, **named}.items():
            setattr(step, name, value)
    assert raw(own.model.variables) == weights


LAYERS = {
    "inside": ("part 'student'", lambda it: it.inner, keras.Sequential.pop),
    "teacher": ("part 'student'", lambda it: it.inner_of_teacher, add),
    "plain": ("part 'plain'", lambda it: it.plain, add),
    "other": ("other models", lambda it: it.inner_of_critic, add),
}


@pytest.mark.parametrize(("what", "model", "change"), LAYERS.values(), ids=LAYERS)
def test_a_composed_step_refuses_layers_that_came_or_went(traced, what, model, change):
    own, call = traced
    layers = (model(own), *model(own).layers)
    change(model(own))
    try:
        with pytest.raises(
            scaler.InvalidArgument, match=rf"plain, student: .* traced: the .* of {what} \((with|without) '\w+'\)\. "
        ):
            call(DATA)
    finally:
        of_layers(*layers)


def test_what_is_again_as_it_was_is_no_change(traced):
    own, call = traced
    own.step.retry = True
    own.step.retry = False
    add(own.inner)
    own.inner.pop()
    assert call(DATA)["applied"]


def test_models_that_are_built_in_the_trace_are_no_change():
    late, weight = keras.Sequential([keras.layers.Dense(1)]), tf.Variable(1.0)

    def late_loss(given):
        return squared_error(late(given[0]), weight)

    call = tf.function(loops.ComposedStep([loops.Part("weight", weight, late_loss, SGD(0.1))]))
    for _ in range(3):
        call(DATA)
    late.add(keras.layers.ReLU())
    with pytest.raises(scaler.InvalidArgument, match="the layers of other models"):
        call(DATA)


def test_without_a_trace_a_change_takes_effect():
    step = loops.TrainStep(one_layer(), squared_error, SGD(0.1))
    step(DATA)
    step.clip_norm = 0.5
    assert float(step(DATA)["clipped_norm"]) <= 0.5001
