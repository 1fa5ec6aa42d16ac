"""Guards what lint reads from the set-up and the graph: scaling, masters, losses, constants, statistics, shapes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from lint_cases import HALF, MSE, L, batch, function, functional, heavy, scaled, small, train_step

import scaler
from loops.diagnose.lint import subject
from loops.observe import lint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unstressed")]


@pytest.mark.parametrize(("stddev", "named"), [(1e3, "variance"), (1.0, None)])
def test_a_normalization_of_large_data(stddev, named):
    data = np.random.default_rng(0).normal(0.0, stddev, [64, 3]).astype(np.float32)
    normalization = L.Normalization(dtype=HALF)
    normalization.adapt(data)
    found = lint(keras.Sequential([keras.Input([3]), normalization]), scaled(), MSE, (data, data))
    said = [one.measured for one in found if "it normalises" in one.finding]
    assert said == ([f"{normalization.name}.{named} is infinite; float16 ends at 65504."] if named else [])


@pytest.mark.parametrize(
    ("make", "scales", "has_masters"),
    [
        (lambda m: keras.optimizers.Adam(), False, False),
        (lambda m: train_step(m, scaler.NoScaling()), False, True),
        (lambda m: train_step(m, scaler.Static(1.0)), False, True),
        (lambda m: scaler.LossScaleOptimizer(keras.optimizers.Adam(), scaler.NoScaling()), False, True),
        (lambda m: lambda grads, variables: None, False, False),
        (lambda m: train_step(m), True, True),
        (lambda m: train_step(m, scaler.Static(8.0)), True, True),
        (lambda m: train_step(m, allow_16bit_updates=True), True, False),
        (lambda m: scaled(), True, True),
        (lambda m: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), True, False),
        (lambda m: keras.optimizers.SGD(loss_scale_factor=128.0), True, False),
    ],
)
def test_what_a_set_up_scales_and_keeps_is_known(make, scales, has_masters):
    assert subject._scaling_of(make(small("float16")))[:2] == (scales, has_masters)


def test_float16_needs_a_scaler_and_what_becomes_of_small_gradients_is_measured():
    def tiny(y, prediction):
        return 1e-9 * tf.reduce_mean(tf.square(tf.cast(prediction, tf.float32) - y))

    model = small()
    (found,) = heavy(lint(model, keras.optimizers.SGD(), tiny, batch()))
    assert "nothing scales the loss" in found.finding
    assert found.measured.endswith("are zero in float16.")
    assert float(found.measured.split("float32, ")[1].split("%")[0]) > 50
    (found,) = heavy(lint(model, keras.optimizers.SGD(), MSE, batch()))
    assert "0.0% to 0.0% are zero in float16" in found.measured


@pytest.mark.exhaustive
def test_bfloat16_needs_none():
    (found,) = heavy(lint(small("mixed_bfloat16"), scaled(), MSE, batch()))
    assert "has the range of float32" in found.finding
    assert heavy(lint(small("mixed_bfloat16"), keras.optimizers.SGD(), MSE, batch())) == []
    assert heavy(lint(small("float32"), scaled(), MSE, batch())) == []


def test_weights_of_16_bits_need_masters():
    model = small("float16")
    (found,) = heavy(lint(model, train_step(model, allow_16bit_updates=True), MSE, batch()))
    assert "without float32 masters" in found.finding
    assert "2 of 4 trainable variables" in found.measured


def test_outputs_in_float16_are_named_by_their_layer():
    (found,) = heavy(lint(small(last=HALF), scaled(), MSE, batch()))
    assert (found.layer, found.finding.split(":")[0]) == ("last", "the loss gets float16 predictions")


def bce(y, prediction):
    return tf.reduce_mean(
        tf.cast(keras.losses.binary_crossentropy(tf.cast(y, prediction.dtype), prediction), tf.float32)
    )


@pytest.mark.exhaustive_with(
    "bce-At predictions of 1 it is inf, and", "<lambda>-At predictions of 300 it is inf, and 8.9"
)
@pytest.mark.parametrize(
    ("loss", "finds"),
    [
        (bce, "At predictions of 1 it is inf, and"),
        (lambda y, p: tf.reduce_mean(tf.square(p - tf.cast(y, p.dtype))), "At predictions of 300 it is inf, and 8.9"),
        (keras.losses.BinaryCrossentropy(), None),
    ],
)
def test_a_loss_that_computes_in_float16_is_found(loss, finds):
    said = heavy(lint(small(last=HALF, activation="sigmoid"), scaled(), loss, batch()))
    losses = [one for one in said if one.layer is None]
    assert len(losses) == (finds is not None), said
    assert all(finds in one.measured for one in losses), losses


@pytest.mark.exhaustive_with("last1-loss1-y1", "last2-loss2-y2")
@pytest.mark.parametrize(
    ("last", "loss", "y"),
    [
        (
            [L.Dense(16, activation="softmax", dtype="float32")],
            *(keras.losses.SparseCategoricalCrossentropy(), np.ones([16], np.int32)),
        ),
        (
            [L.Dense(16, dtype=HALF), L.Activation("softmax", dtype="float32")],
            *(keras.losses.CategoricalCrossentropy(), np.eye(16)),
        ),
        (
            [L.Dense(16, activation="sigmoid", dtype="float32")],
            *(keras.losses.BinaryCrossentropy(), np.ones([16, 16])),
        ),
    ],
)
def test_logits_that_keras_takes_from_behind_a_float32_output_are_not_the_losss(last, loss, y):
    model = keras.Sequential([keras.Input([8]), L.Dense(8, dtype=HALF), *last])
    assert lint(model, scaled(), loss, (batch()[0], y)) == []


def test_an_operation_of_a_functional_model_is_named():
    keras.backend.clear_session()
    (found,) = heavy(lint(functional(lambda h: keras.ops.log(keras.ops.relu(h) + 1 + 1e-8)), scaled(), MSE, batch()))
    assert (found.layer, found.finding.split(":")[0]) == ("add_1", "the constant 1e-08 is 0 in float16")


def test_a_mask_that_is_chosen_is_a_note():
    choose = function("choose", lambda x: tf.nn.softmax(tf.where(x > 0, x, tf.cast(-1e9, x.dtype))))
    model = keras.Sequential([keras.Input([8]), choose, L.Dense(8, dtype="float32")])
    (found,) = lint(model, scaled(), MSE, (np.eye(8), np.ones([8, 8])))
    assert found.is_note
    assert "the mask -1e+09 is -inf" in found.finding


def test_shapes_for_tensor_cores_are_notes():
    layers = [L.Dense(10, dtype=HALF, name="odd"), L.Dense(16, dtype="float32"), L.Dense(8, dtype=HALF, name="even")]
    model = keras.Sequential([keras.Input([8]), *layers, L.Dense(8, dtype="float32")])
    (note,) = lint(model, scaled(), MSE, batch())
    assert (note.layer, note.is_note) == ("odd", True)
    assert "10 is not a multiple of 8" in note.measured


@keras.saving.register_keras_serializable("lint_cases")
class Lookup(keras.Model):
    """Casts floats that it is given to float16, as every subclass under the policy does."""

    def __init__(self, rows):
        super().__init__(dtype=HALF)
        self.words = L.Embedding(rows, 8, dtype=HALF, name="words")
        self.last = L.Dense(8, dtype="float32")

    def call(self, x):
        return self.last(self.words(x)[:, 0])


@pytest.mark.exhaustive_with("3000-float32-1")
@pytest.mark.parametrize(("rows", "dtype", "found"), [(3000, "float32", 1), (2049, "float32", 0), (3000, "int32", 0)])
def test_indices_that_are_rounded(rows, dtype, found):
    said = heavy(lint(Lookup(rows), scaled(), MSE, (np.ones([4, 3], dtype), np.ones([4, 8], np.float32))))
    assert [(one.layer, "rounded to their neighbours" in one.finding) for one in said] == [("words", True)] * found


class Counting(L.Layer):
    """A moving average written by hand, in float16 though the layer's own variables are float32."""

    def build(self, shape):
        self.mean = self.add_weight(shape=[shape[-1]], trainable=False, dtype="float16", name="mean")

    def call(self, x):
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.cast(keras.ops.mean(x, 0), "float16"))
        return x


MOVING = {
    "float16": (lambda: L.BatchNormalization(dtype="float16"), "2^-11", "(..., dtype='mixed_float16')."),
    "bfloat16": (lambda: L.BatchNormalization(dtype="bfloat16"), "2^-8", "(..., dtype='mixed_bfloat16')."),
    "by hand": (lambda: Counting(dtype="mixed_float16"), "2^-11", "Create them in float32"),
    "frozen": (lambda: L.BatchNormalization(dtype="float16", trainable=False), None, None),
    "replaced": (lambda: L.SpectralNormalization(L.Dense(8, dtype="float16"), dtype="float16"), None, None),
}


@pytest.mark.exhaustive_with("bfloat16", "frozen")
@pytest.mark.parametrize("case", MOVING)
def test_moving_statistics_of_16_bits(case):
    make, lost, instead = MOVING[case]
    layer = make()
    model = keras.Sequential([keras.Input([8]), layer, L.Dense(8, dtype="float32")])
    found = [one for one in heavy(lint(model, scaled(), MSE, batch())) if "moving statistics" in one.finding]
    assert [one.layer for one in found] == [layer.name] * (lost is not None)
    for one in found:
        assert f"smaller than {lost} of its value is lost" in one.measured
        assert ("65504" in one.measured) == (lost == "2^-11")
        assert instead in one.instead


def test_the_advice_for_moving_statistics_is_right():
    """Of a mean of 10 and a deviation of 0.1, and with masters for the weights beside it."""
    means = {}
    x = np.random.default_rng(0).normal(10.0, 0.1, [256, 8]).astype(np.float32)
    for dtype in ("float16", "mixed_float16"):
        norm = L.BatchNormalization(dtype=dtype, momentum=0.9)
        model = keras.Sequential([keras.Input([8]), norm, L.Dense(8, dtype="float16"), L.Dense(8, dtype="float32")])
        step = train_step(model)
        assert step.masters is not None
        found = [one for one in lint(model, step, MSE, (x, np.zeros_like(x))) if one.layer == norm.name]
        assert any(not one.is_note for one in found) == (dtype == "float16")
        moving = tf.function(lambda x, norm=norm: norm(x, training=True))
        for _ in range(150):
            moving(tf.cast(x, "float16"))
        means[dtype] = np.max(np.abs(np.float32(norm.moving_mean.numpy()) - x.mean(0)))
    assert means["float16"] > 0.02
    assert means["mixed_float16"] < 0.001
