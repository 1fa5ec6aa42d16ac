"""State of layers that a step's passes move, whoever owns the layer: put back on a skip, and never left non-finite."""

import contextlib
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored, one_for_each

import loops
import scaler

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
BAD = np.where(np.arange(32).reshape(8, 4) == 0, np.float32("nan"), X)
MODULE = types.ModuleType("nets")  # Stands for a file of the user's, which a search by names does not enter.
exec("def encode(x): return encoder(x, training=True)", MODULE.__dict__)


def small(*layers):
    return keras.Sequential([keras.Input((4,)), *layers])


def an_encoder(dropout=False):
    """Layers with a state each."""
    norm = keras.layers.BatchNormalization(center=False, scale=False)
    return small(norm, *([keras.layers.Dropout(0.5)] if dropout else []))


class Ways:
    """Ways to call an encoder that a step does not know."""

    def __init__(self, encoder):
        self.encoder = encoder
        self.inner = tf.function(self.plain)

    def plain(self, x):
        return self.encoder(x, training=True)

    def module(self, x):
        MODULE.encoder = self.encoder
        return MODULE.encode(x)

    def function(self, x):
        return self.inner(x)

    def loop(self, x):
        steps = tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, self.plain(h)), [0, x], maximum_iterations=2)
        return steps[1]

    def branch(self, x):
        return tf.cond(tf.shape(x)[0] > 0, lambda: self.plain(x), lambda: x)

    def again(self, x):
        return tf.recompute_grad(self.plain)(x)


EACH = ("module", "function", "loop", "branch", "again")


def a_train_step(call, **options):
    own = small(keras.layers.Dense(4, use_bias=False))
    loss = lambda y, p: tf.reduce_mean(tf.square(call(p) - y))  # noqa: E731
    return loops.TrainStep(own, loss, keras.optimizers.SGD(0.01), loss_scaler=a_scaler(), **options)


def a_part(call):
    head = small(keras.layers.Dense(1, use_bias=False))
    loss = lambda given: tf.reduce_mean(tf.square(head(call(given))))  # noqa: E731
    return loops.Part("head", head, loss, keras.optimizers.SGD(0.01), loss_scaler=a_scaler())


def parts_in_turn(call):
    return loops.ComposedStep([a_part(lambda batch: call(batch[0]))])


def a_scaler():
    return scaler.LossScaler(scaler.Dynamic(16.0))


STEPS = {"train": a_train_step, "in turn": parts_in_turn}


def values(model):
    return [variable.numpy() for variable in model.non_trainable_variables]


def same(first, second):
    return all(map(np.array_equal, first, second))


def check(step, *encoders):
    """A good batch moves the encoders' state, a bad one leaves every bit of it, and a good one moves it again.

    Keras calls layers as before, once no step watches.
    """
    before, states = keras.Operation.__call__, [list(map(values, encoders))]
    for x in (X, BAD, X):
        assert bool(step(a_batch(x))["applied"]) == (x is X)
        states.append(list(map(values, encoders)))
    for place in range(len(encoders)):
        start, good, skipped, last = (state[place] for state in states)
        assert not same(start, good), place
        assert same(good, skipped), place
        assert not same(skipped, last), place
    assert keras.Operation.__call__ is before


def a_batch(x):
    return tf.constant(x), tf.zeros((8, 4))


@pytest.mark.slow_with("in turn")
@pytest.mark.parametrize("step", ["train", "in turn"])
def test_a_model_that_only_the_trace_knows_is_put_back(step):
    """One for each of the ways, one after the other."""
    ways = [Ways(an_encoder()) for _ in EACH]

    def call(x):
        for way, name in zip(ways, EACH, strict=True):
            x = getattr(way, name)(x)
        return x

    check(tf.function(STEPS[step](call), autograph=False), *(way.encoder for way in ways))


@pytest.mark.parametrize(("mode", "step"), [("eager", "in turn"), ("xla", "train")])
def test_so_it_is_without_a_graph_and_under_xla(step, mode):
    encoder = an_encoder(dropout=mode == "eager")
    made = STEPS[step](Ways(encoder).module)
    check(made if mode == "eager" else tf.function(made, autograph=False, jit_compile=True), encoder)


def test_so_it_is_where_xla_compiles_the_passes_alone():
    encoder = an_encoder()
    check(tf.function(a_train_step(Ways(encoder).module, jit_compile=True), autograph=False), encoder)


def test_so_it_is_on_two_replicas_whichever_fails():
    strategy = mirrored(2)
    with strategy.scope():
        encoder = an_encoder()
        step = a_train_step(Ways(encoder).module)
    run = tf.function(lambda batch: strategy.run(step, (batch,)), autograph=False)

    def applied(*inputs):
        outputs = run(one_for_each(strategy, list(map(a_batch, inputs))))
        return bool(strategy.experimental_local_results(outputs["applied"])[0])

    def state():
        return [part.numpy() for one in encoder.non_trainable_variables for part in getattr(one.value, "values", ())]

    assert applied(X, X)
    good = state()
    assert good
    for inputs in ((X, BAD), (BAD, X)):
        assert not applied(*inputs)
        assert same(good, state())


def test_a_spoiled_window_goes_back_to_its_start():
    encoder = an_encoder()
    taken = tf.function(a_train_step(Ways(encoder).module, accumulate=2), autograph=False)
    states = []
    for x in (X, X, BAD, X):
        applied = taken(a_batch(x))["applied"]
        states.append(values(encoder))
    assert not applied
    assert not same(states[0], states[1])
    assert same(states[1], states[3])


def test_a_function_that_a_retry_traces_first_is_no_secret():
    encoder = an_encoder()
    inner = Ways(encoder).function
    step = loops.ComposedStep([a_part(tf.identity)], lambda batch: inner(batch[0]), retry=True)
    check(tf.function(step, autograph=False), encoder)


def test_the_next_trace_knows_the_layers_of_a_function_that_was_traced_before():
    encoder = an_encoder()
    step = a_train_step(Ways(encoder).function)
    step(a_batch(X))
    check(tf.function(step, autograph=False), encoder)


def test_a_function_that_was_traced_before_the_step_is_told():
    ways = Ways(an_encoder())
    ways.function(tf.constant(X))
    with pytest.warns(scaler.ScaleWarning, match="the state of a layer, in a tf.function that was traced before"):
        tf.function(a_train_step(ways.function), autograph=False).get_concrete_function(a_batch(X))
    with pytest.warns(scaler.ScaleWarning, match="the state of a layer, is not finite after a skipped step"):
        a_train_step(ways.function)(a_batch(BAD))


def test_a_layer_that_is_first_called_within_a_window_goes_back_to_its_start():
    encoder, calls = an_encoder(), []

    def late(x):
        calls.append(x)
        return encoder(x, training=True) if len(calls) > 1 else x

    step = a_train_step(late, accumulate=2)
    before = values(encoder)
    step(a_batch(X))
    assert not step(a_batch(BAD))["applied"]
    assert same(before, values(encoder))


@pytest.mark.slow_with("eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_part_whose_turn_it_is_not_keeps_finite_statistics(mode):
    encoders = [small(keras.layers.BatchNormalization(scale=False)) for _ in range(2)]
    losses = [lambda out: tf.reduce_mean(out[0] ** 2), lambda out: tf.reduce_mean(out[1] ** 2)]
    parts = [
        loops.Part(name, encoders[place], losses[place], keras.optimizers.SGD(0.01), every=1 + place)
        for place, name in enumerate(("first", "second"))
    ]
    step = loops.ComposedStep(
        parts, lambda batch: [encoder(x, training=True) for encoder, x in zip(encoders, batch, strict=True)]
    )
    taken = step if mode == "eager" else tf.function(step, autograph=False)
    start = values(encoders[0])
    outputs = taken((tf.constant(X), tf.constant(BAD)))
    assert outputs["first/applied"]
    assert not outputs["second/attempted"]
    assert not same(start, values(encoders[0]))
    assert all(np.isfinite(one).all() for one in values(encoders[1]))


class Renormed(keras.layers.Layer):
    """A layer that assigns its own trainable weight in each call."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        self.scale.assign(self.scale * (1.0 + 0.0 * tf.reduce_sum(x)) * 0.5)
        return x * self.scale


@pytest.mark.parametrize("graph", [True, False])
def test_a_weight_that_a_layer_of_yours_assigns_is_put_back_and_your_own_variables_and_metrics_go_on(graph):
    own, count, mean = small(Renormed()), tf.Variable(0.0), keras.metrics.Mean()

    def loss(y, p):
        count.assign_add(1.0)
        mean.update_state(1.0)
        return tf.reduce_mean((p - y) ** 2)

    step = loops.TrainStep(own, loss, keras.optimizers.SGD(0.0))
    taken = tf.function(step, autograph=False) if graph else step
    with contextlib.nullcontext() if graph else contextlib.suppress(scaler.StuckError):
        assert taken(a_batch(X))["applied"]
        assert own.get_weights()[0].max() == 0.5
        assert count.numpy() == mean.count.numpy() == 1.0
        assert not taken(a_batch(BAD))["applied"]
    assert own.get_weights()[0].min() == 0.5
    assert count.numpy() >= 2.0
    assert mean.count.numpy() >= 2.0
