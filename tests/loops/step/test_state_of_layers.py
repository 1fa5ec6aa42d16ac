"""State of layers that a step's passes move, whoever owns the layer: put back on a skip, and never left non-finite."""

import contextlib
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored

import loops
import scaler

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
BAD = np.where(np.arange(32).reshape(8, 4) == 0, np.float32("nan"), X)
MODULE = types.ModuleType("nets")  # Stands for a file of the user's, which a search by names does not enter.
exec("def encode(x): return encoder(x, training=True)", MODULE.__dict__)


def small(*layers):
    return keras.Sequential([keras.Input((4,)), *layers])


def an_encoder():
    return small(keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5))


class Ways:
    """Ways to call an encoder that a step does not know."""

    def __init__(self, encoder):
        self.encoder = MODULE.encoder = encoder
        self.inner = tf.function(self.plain)

    def plain(self, x):
        return self.encoder(x, training=True)

    def module(self, x):
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


NESTED = ("module", "function", "loop", "branch", "again")


def a_train_step(call, **options):
    own = small(keras.layers.Dense(4))
    loss = lambda y, p: tf.reduce_mean(tf.square(call(p) - y))  # noqa: E731
    return loops.TrainStep(own, loss, keras.optimizers.SGD(0.01), loss_scaler=a_scaler(), **options)


def a_part(call, name, **options):
    head = small(keras.layers.Dense(1), keras.layers.BatchNormalization())
    loss = lambda given: tf.reduce_mean(tf.square(head(call(given), training=True)))  # noqa: E731
    return loops.Part(name, head, loss, keras.optimizers.SGD(0.01), loss_scaler=a_scaler(), **options)


def parts_in_turn(call, **options):
    return loops.ComposedStep([a_part(lambda batch: call(batch[0]), "head")], **options)


def parts_of_one_pass(call, **options):
    return loops.ComposedStep([a_part(tf.identity, "head")], lambda batch: call(batch[0]), **options)


def a_scaler():
    return scaler.LossScaler(scaler.Dynamic(16.0))


STEPS = {"train": a_train_step, "in turn": parts_in_turn, "one pass": parts_of_one_pass}


def values(model):
    return [variable.numpy() for variable in model.non_trainable_variables]


def same(first, second):
    return all(map(np.array_equal, first, second))


def check(step, encoder):
    """A good batch moves the encoder's state, a bad one leaves every bit of it, and a good one moves it again."""
    start = values(encoder)
    assert step(a_batch(X))["applied"]
    good = values(encoder)
    assert not step(a_batch(BAD))["applied"]
    skipped = values(encoder)
    assert step(a_batch(X))["applied"]
    assert not same(start, good)
    assert same(good, skipped)
    assert not same(skipped, values(encoder))


def a_batch(x):
    return tf.constant(x), tf.zeros((8, 4))


@pytest.mark.slow_with(*(f"{way}-{step}" for way in NESTED[1:] for step in ("in turn", "one pass")))
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("way", NESTED)
def test_a_model_that_only_the_trace_knows_is_put_back(step, way):
    encoder = an_encoder()
    check(tf.function(STEPS[step](getattr(Ways(encoder), way)), autograph=False), encoder)


@pytest.mark.slow_with("in turn", "one pass")
@pytest.mark.parametrize("step", STEPS)
def test_so_it_is_in_eager_mode(step):
    encoder = an_encoder()
    check(STEPS[step](Ways(encoder).module), encoder)


@pytest.mark.slow_with("in turn", "one pass")
@pytest.mark.parametrize("step", STEPS)
def test_so_it_is_under_xla(step):
    encoder = an_encoder()
    check(tf.function(STEPS[step](Ways(encoder).module), autograph=False, jit_compile=True), encoder)


def test_so_it_is_where_xla_compiles_the_passes_alone():
    encoder = an_encoder()
    check(tf.function(a_train_step(Ways(encoder).module, jit_compile=True), autograph=False), encoder)


@pytest.mark.slow_with("in turn", "one pass")
@pytest.mark.parametrize("step", STEPS)
def test_so_it_is_on_two_replicas_where_the_second_one_fails(step):
    strategy = mirrored(2)
    with strategy.scope():
        encoder = an_encoder()
        taken = STEPS[step](Ways(encoder).module)
    run = tf.function(lambda batch: strategy.run(taken, (batch,)), autograph=False)

    def both(second):
        batches = [a_batch(X), a_batch(second)]
        given = strategy.experimental_distribute_values_from_function(
            lambda context: batches[context.replica_id_in_sync_group]
        )
        return strategy.experimental_local_results(run(given)["applied"])[0]

    def state():
        return [part.numpy() for one in encoder.non_trainable_variables for part in getattr(one.value, "values", ())]

    assert both(X)
    good = state()
    assert not both(BAD)
    assert good
    assert same(good, state())


@pytest.mark.parametrize("step", ["train", pytest.param("one pass", marks=pytest.mark.slow)])
def test_a_spoiled_window_goes_back_to_its_start(step):
    encoder = an_encoder()
    taken = tf.function(STEPS[step](Ways(encoder).module, accumulate=3), autograph=False)
    batches = [X, X, X, X, BAD, X]
    states = []
    for x in batches:
        applied = taken(a_batch(x))["applied"]
        states.append(values(encoder))
    assert not applied
    assert not same(states[1], states[2])
    assert same(states[2], states[5])


@pytest.mark.parametrize("step", ["one pass", pytest.param("in turn", marks=pytest.mark.slow)])
def test_a_function_that_a_retry_traces_first_is_no_secret(step):
    encoder = an_encoder()
    check(tf.function(STEPS[step](Ways(encoder).function, retry=True), autograph=False), encoder)


def test_the_next_trace_knows_the_layers_of_a_function_that_was_traced_before():
    encoder = an_encoder()
    step = a_train_step(Ways(encoder).function)
    tf.function(step, autograph=False)(a_batch(X))
    check(tf.function(step, autograph=False), encoder)


def test_a_function_that_was_traced_before_the_step_is_told():
    encoder = an_encoder()
    ways = Ways(encoder)
    ways.function(tf.constant(X))
    with pytest.warns(
        scaler.ScaleWarning, match=r"the state of a layer, in a tf.function that was traced before the step"
    ):
        tf.function(a_train_step(ways.function), autograph=False)(a_batch(X))


def test_an_eager_step_tells_of_a_layer_that_it_did_not_know():
    encoder = an_encoder()
    ways = Ways(encoder)
    ways.function(tf.constant(X))
    step = a_train_step(ways.function)
    with pytest.warns(scaler.ScaleWarning, match=r"the state of a layer, is not finite after a skipped step"):
        step(a_batch(BAD))


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


@pytest.mark.parametrize("every", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_part_whose_turn_it_is_not_keeps_finite_statistics(every):
    encoders = [an_encoder(), an_encoder()]
    step = loops.ComposedStep(
        [
            loops.Part("first", encoders[0], lambda out: tf.reduce_mean(out[0] ** 2), keras.optimizers.SGD(0.01)),
            loops.Part(
                "second", encoders[1], lambda out: tf.reduce_mean(out[1] ** 2), keras.optimizers.SGD(0.01), every=2
            ),
        ],
        lambda batch: (encoders[0](batch[0], training=True), encoders[1](batch[1], training=True)),
    )
    taken = step if every else tf.function(step, autograph=False)
    start = values(encoders[0])
    outputs = taken((tf.constant(X), tf.constant(BAD)))
    assert outputs["first/applied"]
    assert not outputs["second/attempted"]
    assert not same(start, values(encoders[0]))
    assert all(np.isfinite(one).all() for one in values(encoders[1]))


class Renormed(keras.layers.Layer):
    """A layer that assigns its own trainable weight in each call."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), initializer="ones")

    def call(self, x):
        self.kernel.assign(self.kernel * tf.cast(1.0 + 0.0 * tf.reduce_sum(x), self.kernel.dtype) * 0.5)
        return x @ self.kernel


@pytest.mark.parametrize("graph", [True, False])
def test_a_weight_that_a_layer_of_yours_assigns_is_put_back(graph):
    own = small(Renormed())
    step = loops.TrainStep(own, lambda y, p: tf.reduce_mean((p - y) ** 2), keras.optimizers.SGD(0.0))
    taken = tf.function(step, autograph=False) if graph else step
    with contextlib.nullcontext() if graph else contextlib.suppress(scaler.StuckError):
        assert taken(a_batch(X))["applied"]
        assert own.get_weights()[0].max() == 0.5
        assert not taken(a_batch(BAD))["applied"]
    assert own.get_weights()[0].min() == 0.5


def test_your_own_variables_and_metrics_go_on():
    count, mean = tf.Variable(0.0), keras.metrics.Mean()
    own = small(keras.layers.Dense(4))

    def loss(y, p):
        count.assign_add(1.0)
        mean.update_state(1.0)
        return tf.reduce_mean(tf.square(p - y))

    step = tf.function(loops.TrainStep(own, loss, keras.optimizers.SGD(0.01)), autograph=False)
    assert not step(a_batch(BAD))["applied"]
    assert count.numpy() >= 1.0
    assert mean.count.numpy() >= 1.0


def test_keras_calls_layers_as_before_once_no_step_watches():
    call = keras.Operation.__call__
    encoder = an_encoder()
    tf.function(a_train_step(Ways(encoder).module), autograph=False)(a_batch(X))
    assert keras.Operation.__call__ is call
