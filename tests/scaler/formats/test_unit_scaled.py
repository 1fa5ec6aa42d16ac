"""Guards unit scaling: the constants of each layer, unit variance at the first step, and what is refused."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored, one_for_each

import scaler
from scaler.backend.layers import Call
from scaler.formats import emulated, unit_cross_entropy, unit_layers, unit_scaled
from scaler.formats.unit_layers import factor_of_attention, factors_of_function
from scaler.formats.unit_scaled import places

layers = keras.layers


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def chain(shape, *stack):
    keras.utils.set_random_seed(0)
    return unit_scaled(keras.Sequential([keras.Input(shape), *stack]))


def gradients_of(model, inputs, upstream=None, **arguments):
    """Outputs, their gradient's way back to the inputs, and to each weight."""
    inputs = tf.constant(inputs)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = model(inputs, **arguments)
    upstream = drawn(*outputs.shape, seed=1) if upstream is None else upstream
    found = tape.gradient(outputs, [inputs, *model.trainable_variables], tf.cast(upstream, outputs.dtype))
    return np.asarray(outputs), *map(np.asarray, found)


def deviation(values):
    return float(np.std(np.asarray(values, np.float64)))


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5 * np.abs(wanted).max())


def test_a_dense_layer_is_the_product_with_three_constants():
    model = chain([48], layers.Dense(12))
    kernel, bias = (np.asarray(variable) for variable in model.trainable_variables)
    x, dy = drawn(100, 48), drawn(100, 12, seed=1)
    outputs, of_inputs, of_kernel, of_bias = gradients_of(model, x, dy)
    assert not bias.any()
    assert deviation(kernel) == pytest.approx(1, abs=0.1)
    close(outputs, x @ kernel / math.sqrt(48))
    close(of_inputs, dy @ kernel.T / math.sqrt(12))
    close(of_kernel, x.T @ dy / math.sqrt(100))
    close(of_bias, dy.sum(axis=0) / math.sqrt(100))


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_a_convolution_is_that_of_keras_with_three_constants(padding):
    settings = {"filters": 6, "kernel_size": 3, "strides": 2, "padding": padding, "use_bias": False}
    model, plain = chain([8, 8, 4], layers.Conv2D(**settings)), keras.Sequential([layers.Conv2D(**settings)])
    plain.build([None, 8, 8, 4])
    plain.set_weights(model.get_weights())
    x = drawn(10, 8, 8, 4)
    found, wanted = gradients_of(model, x), gradients_of(plain, x)
    positions = 16 if padding == "same" else 9
    sizes = (9 * 4, 9 / 4 * 6, 10 * positions)
    for one, other, size in zip(found, wanted, sizes, strict=True):
        close(one, other / math.sqrt(size))


def test_a_deep_chain_has_unit_variance_forward_and_backward():
    stack = [layers.Dense(256, activation="relu") for _ in range(6)]
    model = chain([256], *stack, layers.Dense(64))
    outputs, of_inputs, *weights = gradients_of(model, drawn(512, 256))
    assert [deviation(each) for each in (outputs, of_inputs, *weights)] == pytest.approx([1] * 16, rel=0.25)


def cnn(policy="float32", scaled=True, strides=(1, 2, 2)):
    keras.utils.set_random_seed(0)
    stack = [keras.Input([8, 8, 1])]
    for filters, stride in zip((16, 32, 32), strides, strict=False):
        stack += [
            layers.Conv2D(filters, 3, strides=stride, padding="same", use_bias=False, dtype=policy),
            layers.BatchNormalization(momentum=0.9, dtype=policy),
            layers.ReLU(dtype=policy),
        ]
    stack += [
        layers.Flatten(dtype=policy),
        layers.Dense(10, dtype=policy),
        layers.Activation("linear", dtype="float32"),
    ]
    model = keras.Sequential(stack)
    return unit_scaled(model) if scaled else model


def loss_of(scaled):
    if scaled:
        return unit_cross_entropy
    return lambda labels, logits: tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def weight_gradients(model, images, labels):
    with tf.GradientTape() as tape:
        loss = unit_cross_entropy(labels, model(images, training=True))
    return loss, tape.gradient(loss, model.trainable_variables)


def test_a_convolutional_network_has_it_with_its_loss():
    labels = tf.constant(np.arange(256) % 10, tf.int32)
    _, grads = weight_gradients(cnn(), drawn(256, 8, 8, 1), labels)
    # Of several examples and positions they are not independent, least of all behind the last layer.
    for grad in grads:
        assert 0.5 < deviation(grad) < (2.2 if len(grad.shape) > 1 else 4), grad.shape


def test_the_value_of_the_loss_is_that_of_any_and_its_gradient_has_unit_variance():
    labels, logits = tf.constant(np.arange(64) % 10, tf.int32), tf.Variable(0.01 * drawn(64, 10))
    with tf.GradientTape() as tape:
        loss = unit_cross_entropy(labels, logits)
    plain = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    assert float(loss) == float(plain)
    assert deviation(tape.gradient(loss, logits)) == pytest.approx(1, rel=0.02)


def transformer():
    keras.utils.set_random_seed(0)
    inputs = keras.Input([32], dtype="int32")
    x = layers.Embedding(96, 64)(inputs)
    normal = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(4, 16, flash_attention=False)
    x = layers.Add()([x, attention(normal, normal, use_causal_mask=True)])
    normal = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.Dense(64)(layers.Dense(256, activation="gelu")(normal))])
    logits = layers.Dense(96)(layers.LayerNormalization()(x))
    return unit_scaled(keras.Model(inputs, layers.Activation("linear")(logits)))


@pytest.fixture(scope="module")
def made():
    """A scaled network of each kind, a batch and its gradients, for tests that leave its weights as they are."""
    tokens = np.random.default_rng(0).integers(0, 96, [32, 33]).astype(np.int32)
    images = tf.constant(drawn(16, 8, 8, 1)), tf.constant(np.arange(16) % 10)
    found = {
        "transformer": (transformer(), tf.constant(tokens[:, :-1]), tf.constant(tokens[:, 1:])),
        "cnn": (cnn(), *images),
    }
    return {kind: (*network, weight_gradients(*network)[1]) for kind, network in found.items()}


def test_a_transformer_has_it_within_a_factor_of_two(made):
    model, inputs, _, grads = made["transformer"]
    assert deviation(model(inputs)) == pytest.approx(1, rel=0.25)
    for variable, grad in zip(model.trainable_variables, grads, strict=True):
        if len(variable.shape) > 1 and not variable.path.endswith("bias"):
            assert 0.5 < deviation(tf.convert_to_tensor(grad)) < 2, variable.path


@pytest.mark.parametrize("kind", ["transformer", "cnn"])
def test_each_gradient_of_a_weight_is_a_multiple_of_the_true_one(made, kind, monkeypatch):
    """Whatever the constants are: paths of one weight that meet again have the same ones."""
    model, inputs, labels, grads = made[kind]
    monkeypatch.setattr(
        unit_layers, "scaled", lambda values, forward=1.0, _=1.0: values * tf.cast(forward, values.dtype)
    )
    _, true = weight_gradients(model, inputs, labels)
    for variable, grad, other in zip(model.trainable_variables, grads, true, strict=True):
        one, two = (np.ravel(tf.convert_to_tensor(each)).astype(np.float64) for each in (grad, other))
        if not variable.path.endswith("key/bias"):
            assert one @ two == pytest.approx(np.linalg.norm(one) * np.linalg.norm(two), rel=1e-4), variable.path


@pytest.mark.parametrize("causal", [False, True])
def test_the_mixture_of_attention_has_unit_variance(causal):
    count = 64
    scores, values = drawn(200, count, count), drawn(200, count, 1, seed=1)
    if causal:
        scores = np.where(np.tril(np.ones([count, count])), scores, -np.inf)
    weights = np.exp(scores)
    mixture = weights / weights.sum(axis=-1, keepdims=True) @ values
    assert float(factor_of_attention(count, causal)) * deviation(mixture) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("name", ["relu", "gelu", "tanh", "silu"])
def test_a_function_and_its_slopes_have_a_mean_square_of_one(name):
    function, numbers = keras.activations.get(name), tf.constant(drawn(200_000))
    with tf.GradientTape() as tape:
        tape.watch(numbers)
        values = function(numbers)
    slopes = tape.gradient(values, numbers)
    forward, backward = factors_of_function(function, name, True)
    assert forward * float(np.sqrt(np.mean(np.square(values)))) == pytest.approx(1, rel=0.01)
    assert backward * float(np.sqrt(np.mean(np.square(slopes)))) == pytest.approx(1, rel=0.01)
    both = factors_of_function(function, name, False)
    assert both == (pytest.approx(math.sqrt(forward * backward)),) * 2


def test_the_published_factor_of_the_slopes_of_gelu():
    """graphcore-research/unit-scaling, unit_scaling/functional.py: 1 / 0.675. Its 1 / 0.588 is that of a variance."""
    found = factors_of_function(lambda x: keras.activations.gelu(x, approximate=False), "gelu", True)
    assert found[1] == pytest.approx(1 / 0.675, rel=0.01)


@pytest.mark.slow
def test_float16_keeps_what_it_flushes_without_a_loss_scale():
    images, labels = drawn(1024, 8, 8, 1), tf.constant(np.arange(1024) % 10, tf.int32)
    lost = {}
    for scaled in (False, True):
        models = {policy: cnn(policy, scaled) for policy in ("float32", "mixed_float16")}
        models["mixed_float16"].set_weights(models["float32"].get_weights())
        with tf.GradientTape(persistent=True) as tape:
            hidden = {policy: tf.constant(images) for policy in models}
            seen = {policy: [] for policy in models}
            for policy, model in models.items():
                value = hidden[policy]
                for layer in model.layers:
                    value = layer(value, training=True)
                    seen[policy].append(value)
            losses = {policy: loss_of(scaled)(labels, seen[policy][-1]) for policy in models}
        by_policy = {policy: tape.gradient(losses[policy], seen[policy][:-1]) for policy in models}
        given = sum(int(tf.math.count_nonzero(grad)) for grad in by_policy["float32"])
        gone = sum(
            int(tf.math.count_nonzero(tf.logical_and(narrow == 0, wide != 0)))
            for narrow, wide in zip(by_policy["mixed_float16"], by_policy["float32"], strict=True)
        )
        lost[scaled] = gone / given
    assert lost[False] > 0.005
    assert lost[True] < lost[False] / 100


@pytest.mark.slow_with("xla")
@pytest.mark.parametrize("compiled", [pytest.param(False, id="function"), pytest.param(True, id="xla")])
def test_a_graph_computes_what_eager_mode_does(made, compiled):
    network = cnn(strides=(2,)), *made["cnn"][1:3]
    loss, grads = weight_gradients(*network)
    step = tf.function(weight_gradients, jit_compile=compiled, autograph=False)
    found, others = step(*network)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    for one, other in zip(others, grads, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4 * float(tf.reduce_max(tf.abs(other))))


def test_each_of_two_replicas_computes_what_one_alone_does():
    strategy, images = mirrored(2), drawn(2, 16, 8, 8, 1)
    labels = tf.constant(np.arange(16) % 10, tf.int32)
    with strategy.scope():
        model = cnn(strides=(2,))

    @tf.function(autograph=False)
    def step(batches):
        return strategy.run(lambda batch: weight_gradients(model, batch, labels)[1], args=(batches,))

    grads = step(one_for_each(strategy, list(images)))
    alone = cnn(strides=(2,))
    alone.set_weights(model.get_weights())
    for replica, batch in enumerate(images):
        _, wanted = weight_gradients(alone, tf.constant(batch), labels)
        for grad, other in zip(grads, wanted, strict=True):
            found = strategy.experimental_local_results(grad)[replica]
            np.testing.assert_allclose(found, other, rtol=2e-3, atol=2e-4 * float(tf.reduce_max(tf.abs(other))))


def test_a_batch_of_any_size_has_its_own_constant():
    model, x = chain([16], layers.Dense(4)), drawn(60, 16)
    step = tf.function(
        lambda inputs: tf.gradients(tf.reduce_sum(model(inputs)), model.trainable_variables[0].value)[0],
        input_signature=[tf.TensorSpec([None, 16])],
    )
    wanted = x.T @ np.ones([60, 4]) / math.sqrt(60)
    close(step(tf.constant(x)).numpy(), wanted)


def test_an_emulated_layer_rounds_operands_of_unit_variance():
    x, dy = drawn(64, 64), drawn(64, 64, seed=1)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([64]), layers.Dense(64, use_bias=False)])
    how = emulated("float8_e4m3fn", scaling="current")
    unit_scaled(how(model))
    found = gradients_of(model, x, dy)
    alone = keras.Sequential([keras.Input([64]), layers.Dense(64, use_bias=False)])
    how(alone)
    alone.set_weights(model.get_weights())
    for one, other in zip(found, gradients_of(alone, x, dy), strict=True):
        close(one, other / 8)


def test_emulated_attention_rounds_its_products_as_well():
    def outputs(change):
        keras.utils.set_random_seed(0)
        inputs = keras.Input([8, 16])
        attention = layers.MultiHeadAttention(2, 8, flash_attention=False)(inputs, inputs)
        return unit_scaled(change(keras.Model(inputs, attention)))(drawn(4, 8, 16))

    wanted = outputs(lambda model: model)
    np.testing.assert_allclose(outputs(emulated("float32")), wanted, rtol=1e-4, atol=1e-4)
    assert 0.02 < deviation(outputs(emulated("mxfp4")) - wanted) < 1


def test_a_gradient_of_gradients_is_refused():
    model, x = chain([4], layers.Dense(3, activation="tanh"), layers.Dense(1)), tf.constant(drawn(5, 4))
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            outputs = model(x)
        penalty = tf.reduce_sum(tf.square(inner.gradient(outputs, x)))
    with pytest.raises(scaler.InvalidArgument, match="a gradient of gradients"):
        outer.gradient(penalty, model.trainable_variables)


def graph(*sources):
    return [Call(None, tuple(each)) for each in sources]


def test_edges_that_cut_a_graph():
    # 0 - 1 - 2 - 3 (+ 1) - 4
    calls = graph([], [0], [1], [1, 2], [3])
    found = places(calls, [4], lambda call: len(call.sources) == 2)
    assert [place.free for place in found] == [False, True, False, False, True]
    both = places(calls, [4, 2], lambda call: len(call.sources) == 2)
    assert [place.free for place in both] == [False, True, False, False, False]


def test_branches_are_a_running_mean_with_their_factor_at_the_entry():
    calls = graph([], [0], [0, 1], [2], [3], [4, 2], [5])
    found = places(calls, [6], lambda call: len(call.sources) == 2)
    assert found[2].parts == (pytest.approx(math.sqrt(1 / 2)),) * 2
    assert found[2].delayed == (False, True)
    assert found[1].into_branch == pytest.approx(math.sqrt(1 / 2))
    assert found[5].parts == pytest.approx((math.sqrt(1 / 3), math.sqrt(2 / 3)))
    assert found[5].delayed == (True, False)
    assert [place.into_branch for place in found][3:5] == pytest.approx([math.sqrt(1 / 3), 1])


@pytest.mark.parametrize(
    ("calls", "outputs"),
    [
        pytest.param(graph([], [0], [0], [1, 2]), [3], id="two branches"),
        pytest.param(graph([], [0], [0, 1]), [2, 1], id="a branch that is an output"),
        pytest.param(graph([], [0], [0, 1], [1]), [2, 3], id="a branch that is used elsewhere"),
        pytest.param(graph([], [], [0, 1], [0, 2]), [3], id="a branch of something else as well"),
    ],
)
def test_other_sums_weigh_their_inputs_alike(calls, outputs):
    last = next(at for at in reversed(range(len(calls))) if len(calls[at].sources) == 2)
    found = places(calls, outputs, lambda call: call is calls[last])
    assert found[last].parts == (2**-0.5, 2**-0.5)
    assert not any(found[last].delayed)
    assert {place.into_branch for place in found} == {1.0}


def test_keras_cannot_quantize_what_is_unit_scaled():
    model = scaler.formats.unit_scaled(keras.Sequential([keras.Input([6]), keras.layers.Dense(4, name="one")]))
    with pytest.raises(scaler.InvalidArgument, match="one: this layer is unit-scaled, and Keras's quantize would drop"):
        model.quantize("int8")
    assert set(scaler.formats.changed(model)) == {"one"}
