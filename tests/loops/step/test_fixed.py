"""Guards that a compiled step refuses what was changed since it was traced, in place of ignoring it."""

import keras
import pytest
import tensorflow as tf
from models import batch, squared_error

import loops
import scaler


def made():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    return loops.TrainStep(model, squared_error, keras.optimizers.SGD(0.1))


def replace_the_head(step):
    step.model.pop()
    step.model.add(keras.layers.Dense(1))


CHANGES = {
    "the model's layers": replace_the_head,
    "optimizer": lambda step: setattr(step, "optimizer", keras.optimizers.SGD(0.0)),
    "loss_fn": lambda step: setattr(step, "loss_fn", lambda y, p: squared_error(y, p)),
    "loss_scaler": lambda step: setattr(step, "loss_scaler", scaler.LossScaler()),
    "clip_norm": lambda step: setattr(step, "clip_norm", 1e-9),
    "clip": lambda step: setattr(step, "clip", scaler.ClipByValue(1.0)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_after_the_trace_is_refused_with_its_name(what):
    step = made()
    call = tf.function(step)
    data = tuple(map(tf.constant, batch()))
    call(data)
    call(data)
    before = [variable.numpy() for variable in step.model.variables]
    CHANGES[what](step)
    with pytest.raises(scaler.InvalidArgument, match=rf"changed since it was traced: {what}\. .* Make a new TrainStep"):
        call(data)
    assert all((old == new.numpy()).all() for old, new in zip(before[:2], step.model.variables, strict=False))


def add_inside(inner):
    inner.add(keras.layers.ReLU())


def swap_inside(inner):
    inner.pop()
    add_inside(inner)


CHANGES_INSIDE = {"add": add_inside, "pop": keras.Sequential.pop, "swap": swap_inside}


def nested():
    """A model whose first layer is a model of two layers."""
    inner = keras.Sequential([keras.Input([4]), keras.layers.Dense(4), keras.layers.Dense(4)])
    return keras.Sequential([keras.Input([4]), inner, keras.layers.Dense(1)]), inner


@pytest.mark.slow_with("add", "swap")
@pytest.mark.parametrize("change", CHANGES_INSIDE.values(), ids=CHANGES_INSIDE)
def test_layers_of_a_model_inside_of_the_model_count(change):
    model, inner = nested()
    call, data = tf.function(loops.TrainStep(model, squared_error, keras.optimizers.SGD(0.1))), tensors()
    call(data)
    call(data)
    change(inner)
    with pytest.raises(scaler.InvalidArgument, match="changed since it was traced: the model's layers"):
        call(data)


def tensors():
    return tuple(map(tf.constant, batch()))


class Composed:
    """Two parts that take turns, the second with a model inside and a teacher, and a model that only a loss calls."""

    def __init__(self):
        self.model, self.inner = nested()
        (self.teacher, self.inner_of_teacher), (self.critic, self.inner_of_critic) = nested(), nested()
        self.plain = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        parts = [
            loops.Part("plain", self.plain, self.plain_loss, keras.optimizers.SGD(0.1)),
            loops.Part("student", self.model, self.loss, keras.optimizers.SGD(0.1), teacher=self.teacher),
        ]
        self.step = loops.ComposedStep(parts)

    def plain_loss(self, given):
        return squared_error(given[1], self.plain(given[0]))

    def loss(self, given):
        return squared_error(self.critic(given[0]), self.model(given[0]))


LAYERS = {
    "inside": ("part 'student'", lambda it: it.inner.pop()),
    "teacher": ("part 'student'", lambda it: add_inside(it.inner_of_teacher)),
    "plain": ("part 'plain'", lambda it: it.plain.add(keras.layers.ReLU())),
    "other": ("other models", lambda it: add_inside(it.inner_of_critic)),
}
SETTINGS = {
    "retry": lambda step: setattr(step, "retry", True),
    "accumulate": lambda step: setattr(step, "accumulate", 2),
    "forward": lambda step: setattr(step, "forward", lambda given: given),
    "parts": lambda step: setattr(step, "parts", step.parts[:1]),
    "loss_scaler": lambda step: setattr(step, "loss_scaler", scaler.LossScaler()),
    "scalers": lambda step: step.scalers.update(plain=scaler.LossScaler()),
    "optimizers": lambda step: step.optimizers.update(plain=keras.optimizers.SGD(0.0)),
}


@pytest.fixture(scope="module")
def traced():
    """A composed step and its compiled function, which is put back as it was after each test."""
    own = Composed()
    call = tf.function(own.step)
    call(tensors())
    call(tensors())
    return own, call


@pytest.mark.parametrize("what", SETTINGS)
def test_a_composed_step_refuses_settings_compiled_or_not(traced, what):
    (own, call), step = traced, traced[0].step
    before = {name: getattr(step, name) for name in ("parts", "forward", "loss_scaler", "accumulate", "retry")}
    named = {name: dict(getattr(step, name)) for name in ("scalers", "optimizers")}
    weights = [variable.numpy() for variable in own.model.variables]
    SETTINGS[what](step)
    try:
        with pytest.raises(scaler.InvalidArgument, match=rf"since it was traced: {what}\..*new ComposedStep, and"):
            call(tensors())
        with pytest.raises(scaler.InvalidArgument, match=rf"since it was made: {what}\. .*a new ComposedStep\."):
            step(tensors())
    finally:
        for name, value in {**before, **named}.items():
            setattr(step, name, value)
    assert all((old == new.numpy()).all() for old, new in zip(weights, own.model.variables, strict=True))
    call(tensors())


@pytest.mark.exhaustive_with("other", "teacher")
@pytest.mark.slow_with("teacher", "plain", "other")
@pytest.mark.parametrize(("what", "change"), LAYERS.values(), ids=LAYERS)
def test_a_composed_step_refuses_layers_that_came_or_went(what, change):
    own = Composed()
    call = tf.function(own.step)
    call(tensors())
    call(tensors())
    change(own)
    with pytest.raises(
        scaler.InvalidArgument, match=rf"plain, student: changed since it was traced: the .* of {what}\. "
    ):
        call(tensors())


def test_models_that_are_built_in_the_trace_are_no_change():
    late = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])

    def late_loss(given):
        return squared_error(late(given[0]), model(given[0]))

    call = tf.function(loops.ComposedStep([loops.Part("model", model, late_loss, keras.optimizers.SGD(0.1))]))
    for _ in range(3):
        call(tensors())
    late.add(keras.layers.ReLU())
    with pytest.raises(scaler.InvalidArgument, match="changed since it was traced: the layers of other models"):
        call(tensors())


def test_a_loop_refuses_it_as_well():
    step = made()
    loop = loops.Loop(step, tf.data.Dataset.from_tensors(batch()).repeat())
    loop.run(3)
    step.clip_norm = 1e-9
    with pytest.raises(scaler.InvalidArgument, match="changed since it was traced: clip_norm"):
        loop.run(6)


def test_without_a_trace_a_change_takes_effect():
    step = made()
    step(batch())
    step.clip_norm = 0.5
    assert float(step(batch())["clipped_norm"]) <= 0.5001
