"""What the pages of `docs/recipes/` say goes wrong otherwise: each claim, seen to be so."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from markdown_blocks import python_blocks

import halfstep as hs
import loops
import scaler

pytestmark = pytest.mark.slow


def gradients_in(block, wrap):
    """The gradients of a model in training that holds this block, for fixed data."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), wrap(keras.Sequential([keras.layers.Dense(8), block()]))])

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True)))
        return tape.gradient(loss, model.trainable_variables)

    return [gradient.numpy() for gradient in gradients(tf.random.stateless_normal([32, 4], seed=(0, 1)))]


class Recomputed(keras.layers.Wrapper):
    def call(self, inputs):
        return tf.recompute_grad(self.layer)(inputs)


@pytest.mark.parametrize(
    ("layer", "same"),
    [(keras.layers.LayerNormalization, True), (keras.layers.BatchNormalization, False), ("dropout", False)],
)
def test_checkpointing_spoils_the_gradients_of_layers_that_know_of_training(layer, same):
    block = (lambda: keras.layers.Dropout(0.5, seed=1)) if layer == "dropout" else layer
    plain, recomputed = gradients_in(block, lambda layer: layer), gradients_in(block, Recomputed)
    close = [np.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(plain, recomputed, strict=True)]
    assert all(close) == same


@pytest.mark.skipif(not hasattr(keras, "RematScope"), reason="a later Keras has it")
def test_checkpointing_by_keras_fails_in_a_graph():
    with keras.RematScope(mode="full"):
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="currently supports keywords arguments only when eager execution"):
        model.fit(np.ones([8, 4]), np.ones([8, 2]), verbose=0)
    model.compile("sgd", "mse", run_eagerly=True)
    assert np.isfinite(model.fit(np.ones([8, 4]), np.ones([8, 2]), verbose=0).history["loss"][0])


def test_checkpointing_works_in_fit():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [keras.Input([4]), Recomputed(keras.layers.Dense(8)), keras.layers.Dense(2, dtype="float32")]
    )
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    before = [weight.numpy() for weight in model.trainable_variables]
    model.fit(np.ones([32, 4]), np.ones([32, 2]), epochs=3, verbose=0)
    assert model.optimizer.loss_scaler.counters.applied == 3
    assert not any(np.array_equal(a, b) for a, b in zip(before, model.trainable_variables, strict=True))


class Mask(keras.constraints.Constraint):
    def __init__(self, shape):
        self.kept = tf.Variable(tf.ones(shape), trainable=False)

    def __call__(self, weights):
        return weights * tf.cast(self.kept, weights.dtype)


@pytest.mark.exhaustive_with("float16")
@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
def test_pruning_holds_in_fit(policy):
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(8), keras.layers.Dense(1, dtype="float32")])
    kernel = model.layers[0].kernel
    kernel.constraint = Mask(kernel.shape)
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.Adam(0.01)), "mse", jit_compile=False)
    kernel.constraint.kept.assign(np.eye(8))
    model.fit(np.ones([8, 8]), np.ones([8, 1]), epochs=2, verbose=0)
    assert np.array_equal(kernel.numpy() != 0.0, np.eye(8) != 0.0)


def test_zeros_written_into_the_model_alone_or_the_masters_alone_do_not_last():
    keras.config.set_dtype_policy("float16")
    model = keras.Sequential(
        [keras.Input([8]), keras.layers.Dense(1), keras.layers.Activation("linear", dtype="float32")]
    )
    loss_scaler, optimizer = scaler.LossScaler(scaler.Static(8.0)), keras.optimizers.Adam(0.01)
    masters = scaler.MasterWeights(model.trainable_variables)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_mean(tf.square(model(tf.ones([4, 8])) - 1.0)))
        loss_scaler.apply(optimizer, tape.gradient(scaled, model.trainable_variables), masters)

    for pruned in (model.trainable_variables[0], masters.weights[0]):
        pruned.assign(tf.zeros([8, 1]))
        step()
        assert np.all(model.trainable_variables[0].numpy() != 0.0)
        assert np.all(masters.weights[0].numpy() != 0.0)


def test_fake_quantisation_takes_float32_alone():
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected to be a float tensor but is a half tensor"):
        tf.quantization.fake_quant_with_min_max_vars(tf.ones([2], tf.float16), -1.0, 1.0)


@pytest.mark.skipif(not hasattr(keras.quantizers, "fake_quant_with_min_max_vars"), reason="a later Keras has it")
def test_fake_quantisation_of_keras_loses_its_bits_between_layers():
    x = np.linspace(-1.0, 1.0, 9, dtype=np.float32)[None]
    inputs = keras.Input([9])
    between = keras.Model(inputs, keras.quantizers.fake_quant_with_min_max_vars(inputs, -1.0, 1.0, num_bits=2))
    assert len(np.unique(between(x))) == 9
    assert len(np.unique(keras.quantizers.fake_quant_with_min_max_vars(x, -1.0, 1.0, num_bits=2))) <= 4


def test_a_skipped_step_leaves_the_scales_of_float8_alone():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(8), keras.layers.Dense(1, dtype="float32")])
    model.layers[0].quantize("float8")
    step = loops.TrainStep(model, keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.1))
    run = tf.function(step)

    def state():
        return [variable.numpy() for variable in model.trainable_variables]

    before = state()
    assert not run((tf.fill([4, 8], np.inf), tf.ones([4, 1])))["applied"]
    assert all(map(np.array_equal, before, state()))
    assert run((tf.ones([4, 8]), tf.ones([4, 1])))["applied"]
    assert not np.array_equal(before[3], state()[3])
    assert model.trainable_variables[3].name == "inputs_amax_history"


def test_one_scaler_for_two_optimizers_counts_twice():
    weights, loss_scaler = (
        [tf.Variable([1.0]), tf.Variable([2.0])],
        scaler.LossScaler(scaler.Dynamic(growth_interval=2)),
    )

    @tf.function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            losses = [loss_scaler.scale(tf.reduce_sum(tf.square(weight))) for weight in weights]
        for weight, loss in zip(weights, losses, strict=True):
            loss_scaler.apply(keras_sgd[id(weight)], tape.gradient(loss, [weight]), [weight])

    keras_sgd = {id(weight): keras.optimizers.SGD(0.25) for weight in weights}
    step()
    assert (loss_scaler.counters.attempted, loss_scaler.loss_scale) == (2, 2.0**16)
    assert [float(weight[0]) for weight in weights] == [0.5, 1.0]


def test_under_float16_a_sum_of_penalties_is_a_float16_loss():
    keras.config.set_dtype_policy("float16")
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1, kernel_regularizer="l2")])

    def loss():
        return tf.add_n([tf.reduce_mean(model(tf.ones([2, 4]))), *model.losses])

    loss_scaler = scaler.LossScaler()
    with pytest.warns(scaler.ScaleWarning, match="float16"):
        loss_scaler.scale(loss())
    assert loss().dtype == tf.float16


def test_subclasses_of_dense_are_passed_over_by_float8():
    class Own(keras.layers.Dense):
        pass

    model = keras.Sequential([keras.Input([8]), Own(8)])
    with pytest.warns(UserWarning, match="quantize"):
        model.quantize("float8")
    assert len(model.trainable_variables) == 2


def test_what_keras_3_took_out():
    with pytest.raises(AttributeError, match="get_scaled_loss"):
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()).get_scaled_loss(1.0)
    with pytest.raises(ValueError, match="dynamic"):
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), dynamic=False)


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
def test_a_model_that_is_compiled_anew_trains_what_was_unfrozen():
    page = pathlib.Path(__file__).parents[1] / "docs" / "recipes" / "transfer.md"
    (block,) = python_blocks(page.read_text(encoding="utf-8"))
    backbone = keras.Sequential([keras.Input([3]), keras.layers.Dense(4)])
    backbone.trainable = False
    model = keras.Sequential([backbone, keras.layers.Dense(2)])
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    train = tf.data.Dataset.from_tensors((tf.ones([4, 3]), tf.zeros([4], tf.int32)))
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.Adam(1e-3)), loss=cross_entropy, jit_compile=False)
    model.fit(train, verbose=0)
    before = backbone.get_weights()
    names = {"backbone": backbone, "model": model, "cross_entropy": cross_entropy, "train": train}
    exec(block, {"hs": hs, "keras": keras, **names})
    assert not np.array_equal(backbone.get_weights()[0], before[0])
