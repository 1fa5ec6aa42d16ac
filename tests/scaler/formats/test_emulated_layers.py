"""Guards that emulated layers compute the products of rounded operands, forward and backward, and nothing else."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from format_cases import HOW, LAYERS, RNG, before_and_after, blocks, gradients_of, numbers, saturated

import scaler
from scaler.formats import emulated

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def at_amax(values, name):
    """Current scaling, as Transformer Engine does it: every operation in float32."""
    scale = np.float32(LARGEST[name]) / np.abs(values).max()
    return saturated(values * scale, name) * (np.float32(1) / scale)


def close(found, wanted, tolerance=1e-5):
    wanted = np.asarray(wanted)
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max() + 1e-6)


def dense(**arguments):
    layer = keras.layers.Dense(5, bias_initializer="ones", **arguments)
    layer.build([None, 70])
    return layer


def test_dense_in_float8_rounds_each_operand_once_at_its_own_scale():
    layer, inputs, upstream = dense(), numbers(40, 70), numbers(40, 5)
    emulated("float8_e4m3fn", scaling="current")(layer)
    outputs, of_inputs, of_kernel, of_bias = gradients_of(layer, [tf.constant(inputs)], upstream)
    x, w = at_amax(inputs, "float8_e4m3fn"), at_amax(layer.kernel.numpy(), "float8_e4m3fn")
    dy = at_amax(upstream, "float8_e5m2")
    close(outputs, x @ w + 1)
    close(of_inputs, dy @ w.T)
    close(of_kernel, x.T @ dy)
    # The bias is added behind the product, so its gradient is that of the outputs before it is rounded.
    close(of_bias, upstream.sum(axis=0))


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4"])
def test_blocks_lie_along_what_each_product_sums_over(name):
    layer, inputs, upstream = dense(activation="relu"), numbers(2, 20, 70), numbers(2, 20, 5)
    emulated(name)(layer)
    outputs, of_inputs, of_kernel, _ = gradients_of(layer, [tf.constant(inputs)], upstream)
    flat, kernel = inputs.reshape(40, 70), layer.kernel.numpy()
    before = blocks(flat, name, 1) @ blocks(kernel, name, 0) + 1
    back = upstream.reshape(40, 5) * (before > 0)
    close(outputs, np.maximum(before, 0).reshape(2, 20, 5))
    close(of_inputs, (blocks(back, name, 1) @ blocks(kernel, name, 1).T).reshape(2, 20, 70))
    close(of_kernel, blocks(flat, name, 0).T @ blocks(back, name, 0))


def test_blocks_of_a_convolution_lie_along_channels_and_along_positions():
    layer, inputs, upstream = keras.layers.Conv2D(6, 1), numbers(3, 4, 5, 40), numbers(3, 4, 5, 6)
    layer.build([None, None, None, 40])
    emulated("mxfp6_e2m3")(layer)
    outputs, of_inputs, of_kernel, _ = gradients_of(layer, [tf.constant(inputs)], upstream)
    x, w, dy = inputs.reshape(60, 40), layer.kernel.numpy()[0, 0], upstream.reshape(60, 6)
    name = "mxfp6_e2m3"
    close(outputs, (blocks(x, name, 1) @ blocks(w, name, 0)).reshape(3, 4, 5, 6))
    close(of_inputs, (blocks(dy, name, 1) @ blocks(w, name, 1).T).reshape(3, 4, 5, 40))
    close(of_kernel[0, 0], blocks(x, name, 0).T @ blocks(dy, name, 0))


@pytest.mark.parametrize("kind", LAYERS)
def test_without_rounding_a_layer_computes_what_it_did(kind):
    wanted, found = before_and_after(kind, emulated("float32"))
    assert len(found) == len(wanted) > 2
    for one, other in zip(found, wanted, strict=True):
        close(one, other)


@pytest.mark.parametrize("arguments", [{}, {"mask": True, "use_causal_mask": True}])
def test_attention_keeps_its_masks_dropout_and_scores(arguments):
    inputs = tf.constant(numbers(2, 4, 6))
    layer = keras.layers.MultiHeadAttention(2, 3, dropout=0.5)
    arguments = dict(arguments)
    if arguments.pop("mask", False):
        arguments["attention_mask"] = tf.constant(RNG.random((2, 4, 4)) > 0.3)
    wanted = layer(inputs, inputs, return_attention_scores=True, **arguments)
    emulated("float32")(layer)
    found = layer(inputs, inputs, return_attention_scores=True, **arguments)
    for one, other in zip(found, wanted, strict=True):
        close(one, other)
    assert np.any(layer(inputs, inputs, training=True, **arguments) != found[0])


def test_both_products_of_attention_are_rounded():
    query = numbers(1, 4, 2, 3)
    layer = keras.layers.MultiHeadAttention(2, 3)
    layer(numbers(1, 4, 6), numbers(1, 4, 6))
    emulated("float8_e4m3fn", scaling="current")(layer)
    found, _ = layer._compute_attention(tf.constant(query), tf.constant(query), tf.constant(query))
    key, scaled = at_amax(query, "float8_e4m3fn"), at_amax(query * np.float32(3**-0.5), "float8_e4m3fn")
    scores = tf.nn.softmax(tf.einsum("aecd,abcd->acbe", key, scaled)).numpy()
    close(found, tf.einsum("acbe,aecd->abcd", at_amax(scores, "float8_e4m3fn"), key))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_16_bit_layers_sum_in_float32_and_return_16_bits(policy):
    layer, inputs = dense(dtype=policy), numbers(40, 70)
    emulated("float8_e4m3fn", scaling="current")(layer)
    outputs = layer(inputs)
    narrow = [tf.cast(tf.cast(each, layer.compute_dtype), tf.float32).numpy() for each in (inputs, layer.kernel.value)]
    x, w = (at_amax(each, "float8_e4m3fn") for each in narrow)
    assert outputs.dtype == layer.compute_dtype
    close(tf.cast(outputs, tf.float32), x @ w + 1, 2.0**-7)


@pytest.mark.slow_with("xla")
@pytest.mark.parametrize("how", ["eager", "xla"])
def test_einsum_is_for_layers_of_ones_own(how):
    left, right = numbers(2, 3, 4, 40), numbers(2, 3, 5, 40)
    format = emulated("mxfp8_e4m3", stochastic=["activations"], seed=3)
    scores = HOW[how](lambda: format.einsum("...td,...sd->...ts", left, right))
    close(scores(), np.einsum("...td,...sd->...ts", left, right), 0.1)
    np.testing.assert_array_equal(scores(), scores())
    exact = emulated("mxfp8_e4m3").einsum("...td,...sd->...ts", left, right)
    assert np.any(scores() != exact)
    close(exact, np.einsum("...td,...sd->...ts", *(blocks(each, "mxfp8_e4m3", -1) for each in (left, right))))


def small():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([6]), keras.layers.Dense(4, name="one"), keras.layers.Dense(2, name="two")])


def test_only_some_layers_change_and_their_weights_do_not():
    model = small()
    before = [variable.numpy() for variable in model.variables]
    format = emulated("mxfp4")
    assert list(format.layers_of(model)) == ["one", "two"]
    assert format(model, only=["two"]) is model
    assert all(np.array_equal(one, two.numpy()) for one, two in zip(before, model.variables, strict=True))
    inputs = numbers(3, 6)
    close(model.layers[0](inputs), inputs @ before[0])
    assert np.abs(model.layers[1](inputs[:, :4]) - inputs[:, :4] @ before[2]).max() > 1e-3
    # Cloned, it is what its configuration says.
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    close(clone(inputs), inputs @ before[0] @ before[2])


def test_tried_formats_leave_nothing_behind():
    model, inputs = small(), numbers(3, 6)
    before, variables = model(inputs), len(model.variables)
    with emulated("float8_e4m3fn").tried(model, only=["one"]):
        assert np.any(model(inputs) != before)
        assert len(model.variables) == variables
    np.testing.assert_array_equal(model(inputs), before)
    attention = keras.layers.MultiHeadAttention(1, 2)
    wanted = attention(inputs[None], inputs[None])
    with emulated("mxfp4").tried(attention):
        assert np.any(attention(inputs[None], inputs[None]) != wanted)
    close(attention(inputs[None], inputs[None]), wanted, 1e-6)
    emulated("mxfp4")(model)


def test_a_gradient_penalty_reaches_the_weights_as_without_rounding():
    def penalty_gradients(change):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input([8]), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])
        change(model)
        inputs = tf.random.stateless_normal([32, 8], (1, 2))
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(inputs)
                outputs = model(inputs)
            penalty = tf.reduce_mean(tf.square(tf.norm(inner.gradient(outputs, inputs), axis=1) - 1.0))
        kernels = [layer.kernel for layer in model.layers]
        return tf.concat([tf.reshape(grad, [-1]) for grad in outer.gradient(penalty, kernels)], 0).numpy()

    wanted, found = penalty_gradients(lambda model: None), penalty_gradients(emulated("mxfp8_e4m3"))
    assert np.dot(wanted, found) / np.linalg.norm(wanted) / np.linalg.norm(found) > 0.99
    assert 0.8 < np.linalg.norm(found) / np.linalg.norm(wanted) < 1.25


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
@pytest.mark.parametrize(("way", "mode"), [("layer", "float8"), ("model", "int8"), ("policy", "int8")])
def test_what_is_emulated_cannot_be_quantized_by_keras(mode, way):
    model = emulated("mxfp4")(small())
    x = numbers(2, 6)
    before = model(x)

    def quantize():
        if way == "policy":
            model.layers[0].dtype_policy = f"{mode}_from_float32"
        else:
            (model if way == "model" else model.layers[0]).quantize(mode)

    with pytest.raises(scaler.InvalidArgument, match="one: this layer is emulated in a narrow format, and Keras's"):
        quantize()
    assert set(scaler.formats.changed(model)) == {"one", "two"}
    if way != "policy":
        np.testing.assert_array_equal(model(x), before)
    # What the sentence says: the weights in a model that is made again.
    plain = small()
    plain.set_weights(model.get_weights())
    plain.quantize(mode)
    assert plain.layers[0].quantization_mode == mode


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
def test_what_was_emulated_for_a_while_can_be_quantized_afterwards():
    model = small()
    with emulated("mxfp4").tried(model), pytest.raises(scaler.InvalidArgument):
        model.layers[0].quantize("int8")
    model.quantize("int8")
    assert model.layers[0].quantization_mode == "int8"
