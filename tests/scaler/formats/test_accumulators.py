"""Guards that sums in a narrow accumulator have the bits of plain Python: all three products, on every way to run."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from format_cases import HOW, RNG, assert_same_bits, before_and_after, cast, layers, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from sum_reference import convolved, products, total

import scaler
from scaler.formats import emulated

NAMES = ("float16", "bfloat16")


def sums(accumulators, chunk=None, format="float32", **options):
    return emulated(format, accumulators=accumulators, chunk=chunk, **options)


@functools.cache
def dots(name, chunk):
    """Sums of products of two vectors of any length."""
    vector = tf.TensorSpec([None])
    einsum = sums(name, chunk).einsum
    how = tf.function(input_signature=[vector, vector], autograph=False)
    return how(lambda left, right: einsum("a,a->", left, right))


def dot(left, right, name, chunk):
    # A loop of a few chunks is quicker by hand than traced.
    run = dots(name, chunk) if chunk <= 16 else functools.partial(sums(name, chunk).einsum, "a,a->")
    return run(np.float32(left), np.float32(right)).numpy()


def with_gradients(function, operands, upstream):
    """Values and gradients as a function of tensors, to run in any way."""

    def run(upstream, *operands):
        with tf.GradientTape() as tape:
            tape.watch(operands)
            value = function(*operands)
        return value, *tape.gradient(value, operands, upstream)

    return run, [tf.constant(each) for each in (upstream, *operands)]


def test_a_long_sum_of_ones_stops_where_its_numbers_are_two_apart():
    ones = np.ones(2050)
    assert dot(ones, ones, "float16", 1) == 2048.0
    assert dot(ones, ones, "float16", 16) == 2050.0
    assert dot(ones[:300], ones[:300], "bfloat16", 1) == 256.0
    assert sums("float16").chunk == 16


def test_what_is_beyond_the_largest_value_is_infinite_and_stays_so():
    assert dot([65504.0, 15.0], [1.0, 1.0], "float16", 1) == 65504.0
    assert dot([65504.0, 16.0], [1.0, 1.0], "float16", 1) == np.inf
    assert dot([65504.0, 16.0, -65504.0], [1.0, 1.0, 1.0], "float16", 1) == np.inf
    # Within a chunk it is float32 that holds it.
    assert dot([65504.0, 16.0, -65504.0], [1.0, 1.0, 1.0], "float16", 3) == 16.0
    assert np.isnan(dot([-65504.0, -65504.0, np.inf], [1.0, 1.0, 1.0], "float16", 1))


def test_one_chunk_is_a_float32_sum_that_is_rounded_once():
    left, right = numbers(37), numbers(37)
    part = np.float32(0.0)
    for one, other in zip(left, right, strict=True):
        part += one * other
    for name in NAMES:
        assert dot(left, right, name, 37) == dot(left, right, name, 2**40) == cast(part, name)
        assert dot(left, right, name, 36) == total([*zip(left, right, strict=True)], name, 36)


EDGES = [1.0, 2048.0, 2049.0, 65504.0, 65520.0, 65519.0, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 1 / 3, 256.0, 257.0, 0.0]
VALUES = st.one_of(
    st.sampled_from([*EDGES, *(-value for value in EDGES)]).map(np.float32),
    st.floats(-8.0, 8.0, width=32, allow_subnormal=False),
    st.floats(width=32, allow_nan=False, allow_subnormal=False),
)


@st.composite
def operands(draw):
    shape = [draw(st.integers(1, 3)) for _ in range(3)] + [draw(st.integers(1, 8))]
    batch, rows, columns, length = shape
    count = batch * (rows * length + length * columns + rows * columns)
    flat = np.array(draw(st.lists(VALUES, min_size=count, max_size=count)), np.float32)
    cuts = np.cumsum([batch * rows * length, batch * length * columns])
    left, right, upstream = np.split(flat, cuts)
    return (
        left.reshape(batch, rows, length),
        right.reshape(length, batch, columns),
        upstream.reshape(rows, columns, batch),
    )


@settings(max_examples=10)
@given(operands(), st.sampled_from(NAMES), st.sampled_from([1, 2, 3, 16]))
def test_the_three_products_have_the_bits_of_plain_python(three, name, chunk):
    left, right, upstream = three
    equation = "bik,kbj->ijb"
    run, tensors = with_gradients(lambda *two: sums(name, chunk).einsum(equation, *two), (left, right), upstream)
    for found, wanted in zip(run(*tensors), products(equation, left, right, upstream, name, chunk), strict=True):
        assert_same_bits(found, wanted)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=40), st.sampled_from(NAMES), st.sampled_from([1, 3, 16])
)
def test_long_sums_with_a_shorter_last_chunk(pairs, name, chunk):
    assert_same_bits(dot(*zip(*pairs, strict=True), name, chunk), total(pairs, name, chunk))


EQUATIONS = {
    "dense": ("float16", 1, "...i,ij->...j", "abi,ij->abj", (2, 2, 19), (19, 3)),
    "heads": ("bfloat16", 3, "abc,cde->abde", "abc,cde->abde", (1, 2, 19), (19, 2, 2)),
    "scores": ("float16", 16, "aecd,abcd->acbe", "aecd,abcd->acbe", (1, 3, 2, 18), (1, 2, 2, 18)),
    "broadcast": ("bfloat16", 16, "...td,...sd->...ts", "abtd,bsd->abts", (2, 2, 2, 17), (2, 2, 17)),
    "two axes": ("float16", 3, "dbac,cade->be", "dbac,cade->be", (2, 2, 3, 3), (3, 3, 2, 2)),
    "outer": ("bfloat16", 1, "a,b->ba", "a,b->ba", (4,), (3,)),
}


@pytest.mark.slow_with("heads-xla")
@pytest.mark.parametrize(("kind", "how"), [*((kind, "eager") for kind in EQUATIONS), ("heads", "xla")])
def test_every_equation_in_every_way_to_run(kind, how):
    name, chunk, equation, plain, *shapes = EQUATIONS[kind]
    # Products of 24 bits, which a compiler that fuses a product and an addition does not round.
    left, right = ((numbers(*shape) * 2.0 ** RNG.integers(-6, 6, shape)).astype(np.float32) for shape in shapes)
    upstream = numbers(*np.einsum(plain, left, right).shape)
    run, tensors = with_gradients(lambda *two: sums(name, chunk).einsum(equation, *two), (left, right), upstream)
    wanted = products(plain, left, right, upstream, name, chunk)
    for found, one in zip(HOW[how](run)(*tensors), wanted, strict=True):
        assert_same_bits(found, one)


@pytest.mark.parametrize("how", ["eager", pytest.param("xla", marks=pytest.mark.slow)])
def test_a_product_that_is_subnormal_is_a_zero_without_a_sign(how):
    left, right = np.float32([[-1e-20, -1e-30]]), np.float32([[1e-20], [1e-30]])

    def run(left, right):
        pairs = (left, right), (left[:, :1], right[:1]), (left[:, :1], 0.0 * right[:1])
        return [sums("bfloat16", chunk).einsum("ab,bc->ac", *pair) for chunk in (1, 2) for pair in pairs]

    for found in HOW[how](run)(left, right):
        assert_same_bits(found, [[0.0]])


def test_a_graph_that_does_not_know_its_shapes():
    function = tf.function(
        lambda left, right: sums("float16", 3).einsum("...i,ij->...j", left, right),
        input_signature=[tf.TensorSpec([None, None, None]), tf.TensorSpec([None, 4])],
        autograph=False,
    )
    left, right = numbers(2, 3, 7), numbers(7, 4)
    assert_same_bits(function(left, right), sums("float16", 3).einsum("...i,ij->...j", left, right))
    # No terms are a sum of 0.
    for empty, other in (((2, 3, 0), (0, 4)), ((0, 3, 7), (7, 4))):
        np.testing.assert_array_equal(function(tf.zeros(empty), tf.zeros(other)), np.zeros((*empty[:2], 4)))


CONVOLUTIONS = {
    "causal": ("float16", 1, (layers.Conv1D, 3, 3), {"padding": "causal", "dilation_rate": 2}, (1, 5, 2), (4,)),
    "same": (
        "bfloat16",
        5,
        (layers.Conv2D, 4, (3, 2)),
        {"padding": "same", "strides": (2, 3), "groups": 2},
        (1, 4, 4, 4),
        (0, 0),
    ),
    "valid": ("float16", 5, (layers.Conv2D, 2, (2, 3)), {"strides": (3, 1)}, (1, 5, 3, 3), (0, 0)),
    "dilated": ("bfloat16", 1, (layers.Conv2D, 2, 2), {"padding": "same", "dilation_rate": 3}, (1, 4, 3, 2), (1, 1)),
    "volume": ("float16", 1, (layers.Conv3D, 2, 2), {}, (1, 2, 2, 3, 1), (0, 0, 0)),
}


@pytest.mark.slow_with("same-xla")
@pytest.mark.parametrize(("kind", "how"), [*((kind, "eager") for kind in CONVOLUTIONS), ("same", "xla")])
def test_convolutions_sum_over_places_and_channels_and_over_positions(kind, how):
    name, chunk, (make, *arguments), options, shape, before = CONVOLUTIONS[kind]
    layer, pictures = make(*arguments, use_bias=False, **options), numbers(*shape)
    layer.build(shape)
    upstream = numbers(*layer(pictures).shape)
    kernel = layer.kernel.numpy()
    sums(name, chunk)(layer)

    def run(pictures, upstream):
        with tf.GradientTape() as tape:
            tape.watch(pictures)
            value = layer(pictures)
        return value, *tape.gradient(value, [pictures, layer.kernel.value], upstream)

    wanted = convolved(pictures, kernel, upstream, layer.strides, layer.dilation_rate, before, name, chunk)
    for found, one in zip(HOW[how](run)(tf.constant(pictures), tf.constant(upstream)), wanted, strict=True):
        assert_same_bits(found, one)


@pytest.mark.parametrize("kind", ["dense", "einsum", "attention"])
def test_a_layer_computes_nearly_what_it_did(kind):
    for other, one in zip(*before_and_after(kind, sums("float16")), strict=True):
        np.testing.assert_allclose(one, other, atol=4e-3 * max(1.0, np.abs(other).max()))
        assert kind != "dense" or np.any(one != other)


def test_channels_first_is_the_same_with_other_axes():
    pictures, kernel = numbers(2, 5, 6, 4), numbers(3, 2, 2, 6)
    found = []
    for format in ("channels_last", "channels_first"):
        one = scaler.formats.accumulators.Convolution((2, 1), "same", (1, 1), format)
        values = pictures if format == "channels_last" else np.moveaxis(pictures, -1, 1)
        with tf.GradientTape() as tape:
            tape.watch(values := tf.constant(values))
            accumulator = scaler.formats.accumulators.Accumulator("float16", 3)
            result = one(values, tf.constant(kernel), accumulator)
            weighted = tf.reduce_sum(result * result)
        found.append([result.numpy(), tape.gradient(weighted, values).numpy()])
    for last, first in zip(*found, strict=True):
        np.testing.assert_array_equal(last, np.moveaxis(first, 1, -1))


@pytest.mark.slow
def test_a_graph_that_does_not_know_the_size_of_its_pictures():
    layer = keras.layers.Conv2D(2, 3, strides=2, padding="same")
    layer.build([None, None, None, 2])
    sums("float16", 4)(layer)

    def run(pictures):
        with tf.GradientTape() as tape:
            tape.watch(pictures)
            value = layer(pictures)
        return value, *tape.gradient(value, [pictures, layer.kernel.value])

    graph = tf.function(run, input_signature=[tf.TensorSpec([None, None, None, 2])])
    for shape in ((1, 5, 6, 2), (2, 4, 4, 2)):
        pictures = tf.constant(numbers(*shape))
        for one, other in zip(graph(pictures), run(pictures), strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("format", ["float8_e4m3fn", "mxfp4"])
def test_operands_are_rounded_before(format):
    scaling = "current" if format.startswith("float8") else None
    left, right, upstream = numbers(3, 40), numbers(40, 2), numbers(3, 2)
    narrow = sums("float16", 8, format, scaling=scaling)
    run, tensors = with_gradients(lambda *two: narrow.einsum("ab,bc->ac", *two), (left, right), upstream)
    value, of_left, of_right = run(*tensors)
    x, w, dy = narrow.tensors

    def rounded(how, values, axis):
        return how(tf.constant(values), (axis,)).numpy()

    equation = "ab,bc->ac"
    once = products(equation, rounded(x, left, 1), rounded(w, right, 0), upstream, "float16", 8)[0]
    assert_same_bits(value, once)
    assert_same_bits(of_left, products(equation, left, rounded(w, right, 1), rounded(dy, upstream, 1), "float16", 8)[1])
    assert_same_bits(
        of_right, products(equation, rounded(x, left, 0), right, rounded(dy, upstream, 0), "float16", 8)[2]
    )


def test_gradients_of_gradients_are_sums_of_the_same_kind():
    left, right = tf.constant(numbers(3, 9)), tf.constant(numbers(9, 2))
    narrow = sums("float16", 1)
    with tf.GradientTape() as outer:
        outer.watch(right)
        with tf.GradientTape() as inner:
            inner.watch(left)
            value = tf.reduce_sum(tf.sin(narrow.einsum("ab,bc->ac", left, right)))
        slope = tf.reduce_sum(inner.gradient(value, left) ** 2)
    found = outer.gradient(slope, right)
    # By hand: each step is a product by an equation.
    y = narrow.einsum("ab,bc->ac", left, right)
    of_left = narrow.einsum("ac,bc->ab", tf.cos(y), right)
    of_slope = 2.0 * of_left
    # Through the product of slope and kernel: the kernel itself, and the slope, a function of the kernel.
    direct = narrow.einsum("ab,ac->bc", of_slope, tf.cos(y))
    of_cosine = narrow.einsum("ab,bc->ac", of_slope, right)
    through = narrow.einsum("ab,ac->bc", left, -tf.sin(y) * of_cosine)
    np.testing.assert_array_equal(found, direct + through)


def test_a_penalty_of_gradients_reaches_the_kernel_of_a_convolution():
    def penalty(narrow):
        keras.utils.set_random_seed(1)
        layer = keras.layers.Conv2D(3, 2, strides=2, padding="same", activation="tanh")
        layer.build([None, 5, 5, 2])
        if narrow:
            sums("float16")(layer)
        pictures = tf.random.stateless_normal([2, 5, 5, 2], (1, 2))
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(pictures)
                value = layer(pictures)
            slope = tf.reduce_sum(inner.gradient(value, pictures) ** 2)
        return outer.gradient(slope, layer.kernel.value).numpy()

    wanted, found = penalty(False), penalty(True)
    np.testing.assert_allclose(found, wanted, atol=1e-2 * np.abs(wanted).max())


def network(**options):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([8]), keras.layers.Dense(1, **options)])


SCALE = 2.0**10
TARGETS = tf.fill([4, 1], 0.5)
BATCHES = {"fine": tf.ones([4, 8]), "too large": tf.fill([4, 8], 200.0)}
"""The gradient of a kernel of zeros sums four products of an input and -256, each of them finite in float16. The sum of
the large ones is not."""


def test_a_sum_that_overflows_is_seen_in_the_gradient():
    model = network(kernel_initializer="zeros")
    sums("float16", 1, "float16")(model)
    for kind, inputs in BATCHES.items():
        with tf.GradientTape() as tape:
            loss = SCALE * tf.reduce_mean((model(inputs) - TARGETS) ** 2)
        of_kernel, of_bias = tape.gradient(loss, model.trainable_variables)
        assert np.all(of_kernel == (-4 * 256.0 if kind == "fine" else -np.inf))
        assert np.all(of_bias == -4 * 256.0)


def test_replicas_sum_alike():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = network()
    sums("bfloat16", 3)(model)
    inputs, expected = tf.constant(numbers(4, 8)), network()
    sums("bfloat16", 3)(expected)
    found = tf.function(lambda: strategy.run(lambda: model(inputs, training=True)), autograph=False)()
    for one in strategy.experimental_local_results(found):
        np.testing.assert_array_equal(one, expected(inputs))


def test_a_format_tried_leaves_no_accumulator_behind():
    layer, inputs = keras.layers.Dense(2), numbers(3, 40)
    before = layer(inputs)
    with sums("bfloat16", 1).tried(layer):
        assert np.any(layer(inputs) != before)
    np.testing.assert_array_equal(layer(inputs), before)


@pytest.mark.slow
def test_unit_scaling_keeps_the_accumulator():
    def of(chunk):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input([40]), keras.layers.Dense(2, name="one")])
        sums("bfloat16", chunk)(model)
        scaler.formats.unit_scaled(model)
        return model(inputs).numpy()

    inputs = numbers(3, 40)
    assert np.any(of(1) != of(40))
