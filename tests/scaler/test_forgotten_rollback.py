"""Guards BatchNorm's statistics where nobody took a snapshot, or too late: put back if it can be done, else said."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored
from models import batch
from rigs import raw
from scaler_cases import gradients_of, take

import scaler

BAD = np.full((8, 4), np.nan, np.float32)


def batch_norm(**arguments):
    return keras.layers.BatchNormalization(momentum=0.5, **arguments)


def network(kind="float32", name=None):
    keras.utils.set_random_seed(1)
    # Few weights are traced soon; one of BatchNorm's own tells that its layer is updated.
    plain, norm = {"use_bias": False, "dtype": kind}, batch_norm(scale=False, dtype=kind)
    layers = [keras.layers.Dense(3, **plain), norm, keras.layers.Dense(1, **plain)]
    return keras.Sequential([keras.Input([4], dtype=kind), *layers], name=name)


class Step:
    """A step written by hand, whose snapshot is early, late or missing."""

    def __init__(self, snapshot=None, kind="float32", inner=False, training=True):
        self.model, self.loss_scaler = network(kind), scaler.LossScaler(scaler.Dynamic(8.0))
        self.masters = scaler.MasterWeights(self.model.trainable_variables)
        self.snapshot, self.optimizer = snapshot, keras.optimizers.SGD(0.01)
        self.forward = lambda x: self.model(x, training=training)
        if inner:
            self.forward = tf.function(self.forward)

    def __call__(self, x, y):
        state = self.model.non_trainable_variables
        before = scaler.snapshot(state) if self.snapshot == "early" else None
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.cast(self.forward(x), tf.float32) - y) ** 2)
            scaled = self.loss_scaler.scale(loss)
        before = scaler.snapshot(state) if self.snapshot == "late" else before
        grads = tape.gradient(scaled, self.model.trainable_variables)
        return self.loss_scaler.apply(self.optimizer, grads, self.masters, rollback=before).finite

    def statistics(self):
        return raw([v for v in self.model.non_trainable_variables if "moving" in v.path])


def in_a_loop(step):
    @tf.function
    def run(x, y):
        finite = tf.constant(False)
        for _ in tf.range(1):
            finite = step(x, y)
        return finite

    return run


GRAPHS = {"graph": tf.function, "loop": in_a_loop}


@pytest.mark.slow_with("loop-float16")
@pytest.mark.parametrize(("mode", "kind"), [("graph", "float32"), ("loop", "float16")])
def test_a_missing_snapshot_is_made_up_for(mode, kind):
    step, with_snapshot = Step(kind=kind), Step("early", kind=kind)
    run = GRAPHS[mode](step)
    x, y = batch()
    for inputs in (x, BAD, 2 * x, BAD, 1e30 * x, x):
        before = step.statistics()
        applied = run(inputs, y)
        fits = np.abs(inputs).max() < (1e4 if kind == "float16" else 1e38)
        assert bool(applied) == bool(with_snapshot(inputs, y)) == fits
        if not applied:
            assert step.statistics() == before
        assert step.statistics() == with_snapshot.statistics()
        assert all(np.isfinite(v.numpy()).all() for v in step.model.non_trainable_variables)


@pytest.mark.slow
def test_two_steps_in_one_function():
    step = Step()
    x, y = batch()
    run = tf.function(lambda first, second: (step(first, y), step(second, y)))
    assert [bool(finite) for finite in run(x, x)] == [True, True]
    alone = Step("early")
    for _ in range(2):
        alone(x, y)
    for inputs in ((x, BAD), (BAD, x)):
        assert [bool(finite) for finite in run(*inputs)] == [inputs[0] is x, inputs[1] is x]
        alone(x, y)
        assert step.statistics() == alone.statistics()


def without_weights():
    layers = [batch_norm(center=False, scale=False), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input([4]), *layers])
    return lambda x: model(x, training=True), model.variables, model.trainable_variables


def plain_head_on_a_base():
    base, head = network(), keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    return lambda x: head(base(x, training=True)), base.variables, head.trainable_variables


@pytest.mark.slow_with("plain_head_on_a_base")
@pytest.mark.parametrize("build", [without_weights, plain_head_on_a_base])
def test_statistics_of_layers_that_are_not_updated(build):
    forward, variables, weights = build()
    loss_scaler, optimizer = scaler.LossScaler(scaler.Dynamic(8.0)), keras.optimizers.SGD(0.01)

    @tf.function
    def step(x):
        return loss_scaler.apply(
            optimizer, gradients_of(loss_scaler, lambda: tf.reduce_mean(forward(x) ** 2), weights), weights
        ).finite

    x, _ = batch()
    before = raw(variables)
    assert step(x)
    after = raw(variables)
    assert after != before
    assert not step(BAD)
    assert raw(variables) == after


@pytest.mark.slow
def test_two_networks_that_meet_put_back_their_own():
    """A generator and its discriminator in one forward pass: whoever skips puts back its own statistics."""
    first, second = network(name="first"), keras.Sequential([keras.Input([1]), batch_norm(), keras.layers.Dense(1)])
    scalers = [scaler.LossScaler(scaler.Dynamic(8.0)) for _ in range(2)]
    optimizers = [keras.optimizers.SGD(0.01) for _ in range(2)]

    @tf.function
    def step(x, factors):
        with tf.GradientTape(persistent=True) as tape:
            output = tf.reduce_mean(second(first(x, training=True), training=True) ** 2)
            scaled = [own.scale(output * factors[number]) for number, own in enumerate(scalers)]
        outcomes = []
        for number, model in enumerate((first, second)):
            weights = model.trainable_variables
            grads = [grad * factors[number] for grad in tape.gradient(scaled[number], weights)]
            outcomes.append(scalers[number].apply(optimizers[number], grads, weights, update=False).finite)
        return outcomes

    x, _ = batch()
    assert all(step(x, tf.ones(2)))
    before = raw(first.non_trainable_variables), raw(second.non_trainable_variables)
    first_finite, second_finite = step(x, tf.constant([1.0, np.nan]))
    assert not second_finite
    assert raw(second.non_trainable_variables) == before[1]
    assert (raw(first.non_trainable_variables) != before[0]) == bool(first_finite)
    assert not any(step(BAD, tf.ones(2)))
    assert all(np.isfinite(v.numpy()).all() for m in (first, second) for v in m.non_trainable_variables)


@pytest.mark.slow
def test_when_is_a_tensor():
    model, loss_scaler = network(), scaler.LossScaler(scaler.Dynamic(8.0))
    optimizer, weights = keras.optimizers.SGD(0.01), model.trainable_variables

    def step(x, when, rollback):
        before = scaler.snapshot(model.non_trainable_variables) if rollback else None
        grads = gradients_of(loss_scaler, lambda: tf.reduce_mean(model(x, training=True) ** 2), weights)
        return loss_scaler.apply(optimizer, grads, weights, when=when, rollback=before).finite

    x, _ = batch()
    tf.function(step).get_concrete_function(x, tf.constant(False), True)
    tf.function(step).get_concrete_function(x, False, False)
    with pytest.warns(scaler.ScaleWarning, match=r"without rollback.*moving_"):
        tf.function(step).get_concrete_function(x, tf.constant(False), False)


def test_under_fit_without_protect():
    model = network()
    model.compile(
        scaler.LossScaleOptimizer(keras.optimizers.SGD(0.01), scaler.Dynamic(8.0)), loss="mse", jit_compile=False
    )
    x, y = batch()
    model.fit(x, y, batch_size=8, verbose=0)
    before = raw(model.variables)
    model.fit(BAD, y, batch_size=8, verbose=0)
    assert raw(model.variables) == before


def test_a_forward_pass_in_a_function_of_its_own_is_named():
    with pytest.warns(scaler.ScaleWarning, match=r"without rollback.*moving_"):
        tf.function(Step(inner=True)).get_concrete_function(*map(tf.constant, batch()))


def test_eager_steps_and_gradients_from_elsewhere_are_named():
    x, y = batch()
    step = Step()
    with pytest.warns(scaler.ScaleWarning, match=r"without rollback.*batch_normalization"):
        step(tf.constant(x), y)
    step(tf.constant(x), y)
    step = Step()
    weights = step.model.trainable_variables
    grads = [step.loss_scaler.loss_scale * tf.ones(weight.shape) for weight in weights]
    with pytest.warns(scaler.ScaleWarning, match="without rollback"):
        tf.function(lambda *given: step.loss_scaler.apply(step.optimizer, list(given), weights).finite)(*grads)


@pytest.mark.slow
def test_on_replicas_it_is_named():
    strategy = mirrored(2)
    with strategy.scope():
        step = Step()
    x, y = batch()
    with pytest.warns(scaler.ScaleWarning, match="without rollback"):
        tf.function(lambda: strategy.run(step, (tf.constant(x), y))).get_concrete_function()


@pytest.mark.parametrize("name", ["conv1_bn", "bn2", "block_1_expand_BN", "norm"])
def test_batch_norm_by_other_names(name):
    model = keras.Sequential([keras.Input([4]), batch_norm(name=name), keras.layers.Dense(1)])
    loss_scaler, optimizer = scaler.LossScaler(scaler.Dynamic(8.0)), keras.optimizers.SGD(0.01)

    def step(training, rollback):
        before = scaler.snapshot(model.non_trainable_variables) if rollback else None
        grads = gradients_of(
            loss_scaler, lambda: tf.reduce_mean(model(x, training=training) ** 2), model.trainable_variables
        )
        return loss_scaler.apply(optimizer, grads, model.trainable_variables, rollback=before).finite

    x = tf.constant(batch()[0])
    step(True, True)
    if name == "norm":
        step(False, False)
    else:  # Of an eager step the names of its weights are all that is known.
        with pytest.warns(scaler.ScaleWarning, match=rf"without rollback.*{name}"):
            step(True, False)


def test_a_bottleneck_is_no_batch_norm():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1, name="bn")])
    loss_scaler, optimizer = scaler.LossScaler(scaler.Dynamic(8.0)), keras.optimizers.SGD(0.01)
    grads = gradients_of(loss_scaler, lambda: tf.reduce_mean(model(tf.ones([2, 4])) ** 2), model.trainable_variables)
    assert loss_scaler.apply(optimizer, grads, model.trainable_variables).finite


@pytest.mark.parametrize("inner", [False, True])
def test_a_late_snapshot_is_named_also_after_an_inner_function(inner):
    with pytest.warns(scaler.ScaleWarning, match="before the forward pass"):
        tf.function(Step("late", inner=inner)).get_concrete_function(*map(tf.constant, batch()))


def test_an_average_that_follows_is_no_forward_pass_and_hides_none_before_or_after_it():
    weight, loss_scaler = tf.Variable([1.0]), scaler.LossScaler(scaler.Dynamic(8.0))
    moving = {name: tf.Variable([0.0], name=f"moving_{name}") for name in ("average", "before", "after")}

    @tf.function
    def run():
        take(loss_scaler, scaler.move_nothing, lambda: tf.reduce_sum(weight), [weight])
        moving["before"].assign_add([1.0])
        with scaler.authoring.no_forward_pass():
            for one in moving.values():
                one.assign(0.5 * one + 0.5)
        moving["after"].assign_add([1.0])
        scaler.snapshot([moving["average"]])
        for name in ("before", "after"):
            with pytest.warns(scaler.ScaleWarning, match=f"moved 'moving_{name}' before this snapshot"):
                scaler.snapshot([moving[name]])

    run.get_concrete_function()


@pytest.mark.slow
def test_several_losses_with_a_snapshot():
    model, losses = network(), scaler.PerLoss({"a": scaler.Dynamic(8.0), "b": scaler.Dynamic(8.0)})
    optimizer, (x, y) = keras.optimizers.SGD(0.01), batch()

    def step(x):
        before = scaler.snapshot(model.non_trainable_variables)
        with tf.GradientTape(persistent=True) as tape:
            prediction = model(x, training=True)
            scaled = losses.scale({"a": tf.reduce_mean((prediction - y) ** 2), "b": tf.reduce_mean(prediction)})
        grads = {name: tape.gradient(loss, model.trainable_variables) for name, loss in scaled.items()}
        return losses.apply(optimizer, grads, model.trainable_variables, rollback=before).finite

    assert step(x)
    run = tf.function(step)
    assert run(x)
    before = raw(model.variables)
    assert not run(BAD)
    assert raw(model.variables) == before


class Codebook(keras.layers.Layer):
    """A layer with a state of its own, which no name tells."""

    def build(self, shape):
        self.centre = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="centre")

    def call(self, x):
        self.centre.assign(0.5 * self.centre + 0.5 * tf.reduce_mean(x, 0))
        return x - self.centre


@pytest.mark.parametrize("frozen", [False, True])
def test_state_of_any_layer_is_made_up_for_and_your_own_goes_on(frozen):
    own, count = keras.Variable([0.0] * 4, name="centre"), tf.Variable(0.0)
    layer = Codebook()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), layer, keras.layers.Dropout(0.5)])
    model.layers[0].trainable = not frozen
    weight = tf.Variable([1.0] * 4)
    trained = [*model.trainable_variables, weight]
    loss_scaler, optimizer = scaler.LossScaler(scaler.Dynamic(8.0)), keras.optimizers.SGD(0.01)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            own.assign(own + 1.0)
            count.assign_add(1.0)
            scaled = loss_scaler.scale(tf.reduce_mean((model(x, training=True) * weight) ** 2))
        return loss_scaler.apply(optimizer, tape.gradient(scaled, trained), trained).finite

    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    assert step(x)
    before = raw(model.variables)
    assert not step(x * np.nan)
    assert raw(model.variables) == before
    assert own.numpy()[0] == count.numpy() == 2.0
    assert step(x)
    assert np.isfinite(layer.centre.numpy()).all()


def test_weights_that_another_optimizer_moved_are_no_state():
    """A discriminator is frozen while the generator's step is traced: its own update, made before, stays."""
    discriminator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)])
    generator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, use_bias=False)])
    scalers = [scaler.LossScaler(scaler.Dynamic(8.0)) for _ in range(2)]
    optimizers = [keras.optimizers.SGD(0.1) for _ in range(2)]

    @tf.function
    def step(x, factor):
        for place, trained in enumerate((discriminator, generator)):
            discriminator.trainable = place == 0
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(discriminator(generator(x)) ** 2) * (factor if place else 1.0)
                scaled = scalers[place].scale(loss)
            grads = tape.gradient(scaled, trained.weights)
            finite = scalers[place].apply(optimizers[place], grads, trained.weights).finite
        return finite

    before = raw(discriminator.variables)
    assert not step(np.ones((8, 4), "float32"), np.float32("nan"))
    assert raw(discriminator.variables) != before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_statistics_in_16_bits_are_told_with_the_ways_out(dtype):
    """Of code, and of who wrote none and only ran the command."""
    with pytest.warns(scaler.ScaleWarning, match=f"dtype='mixed_{dtype}' .*--policy mixed_{dtype}"):
        scaler.authoring.warn_of_narrow_statistics(network(dtype))
