"""Of a skip it is told where it began, as far as that can be known: which weight, which gradient, which derivative.

Guards line 6 of the promise: a skip names its tensor and what would help, and claims nothing that was not seen.
"""

import functools
import itertools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from rigs import Rig
from ways import second_look

import loops
import scaler
from scaler import Cause


class SpoiledAbove(keras.layers.Layer):
    """Its derivative is infinite for large values."""

    def call(self, value):
        @tf.custom_gradient
        def spoiled(value):
            slope = tf.where(tf.reduce_any(tf.abs(value) > 10.0), np.inf, 1.0)
            return tf.identity(value), lambda grad: grad * slope

        return spoiled(value)


def model_of(policy):
    """Three dense layers, the third of them behind one whose derivative can be spoiled."""
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(2, dtype=policy, name=name) for name in "abc"]
    return keras.Sequential([keras.Input([3]), *dense[:2], SpoiledAbove(dtype="float32"), dense[2]])


@functools.cache
def compiled(policy="float32", **options):
    """A step that is traced once, for those who set it back first."""
    loss_scaler = scaler.LossScaler(scaler.Dynamic(8.0))
    return Rig(model_of(policy), keras.optimizers.SGD(0.01), example=inputs(), loss_scaler=loss_scaler, **options)


def fresh(policy="float32", **options):
    """Such a step as it began, and what calls it."""
    rig = compiled(policy, **options)
    rig.reset()
    return rig.step, rig.call


def looking_again(model, loss_fn, strategy):
    """A step by hand that lets `apply` differentiate a skipped step at lower scales."""
    loss_scaler, weights = scaler.LossScaler(strategy), model.trainable_variables
    updated = scaler.MasterWeights(weights) if weights[0].dtype == "float16" else weights
    optimizer = keras.optimizers.SGD(0.01)

    def step(batch):
        x, y = batch
        with tf.GradientTape(persistent=True) as tape:
            scaled = loss_scaler.scale(loss_fn(y, model(x, training=True)))

        def again(small):
            return tape.gradient(scaled, weights, output_gradients=small)

        return loss_scaler.apply(optimizer, tape.gradient(scaled, weights), updated, diagnose=again)._asdict()

    rows = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2])
    return loss_scaler, tf.function(step, input_signature=[rows])


def inputs(rows=4, value=1.0):
    return tf.fill([rows, 3], value), tf.zeros([rows, 2])


@pytest.mark.slow_with("mixed_float16-inf")
@pytest.mark.parametrize(("policy", "bad"), [("float32", np.nan), ("mixed_float16", np.inf)], ids=str)
def test_a_weight_that_is_not_finite_already_is_named(policy, bad):
    step, call = fresh(policy)
    assert call(inputs())["applied"]
    layer = step.model.layers[-1]
    layer.kernel.assign(tf.fill(layer.kernel.shape, bad))
    outputs = call(inputs())
    assert not outputs["applied"]
    assert outputs["cause"] == Cause.LOSS
    said = step.loss_scaler.explain()
    assert f"because the weight {layer.kernel.path!r} is already non-finite, and so is the loss; " in said
    assert "No loss scale can help" in said


def test_bad_data_is_told_from_bad_weights():
    step, call = fresh()
    outputs = call(inputs(value=np.nan))
    assert outputs["cause"] == Cause.LOSS
    assert "the loss itself was not finite, though all trained weights are; " in step.loss_scaler.explain()
    assert "is the first of 6 that are non-finite, with a NaN among them" in step.loss_scaler.explain()
    assert int(outputs["variable"]) == 5


def begun_in_the_middle(step):
    """What is said of a derivative that is spoiled between the second and the third layer."""
    path = step.model.layers[1].bias.path
    return f"is the first of 4 that are non-finite, with a NaN among them, and that of {path!r} the last"


def test_the_gradient_nearest_to_the_loss_is_named_where_it_began_in_the_middle():
    step, call = fresh()
    assert int(call(inputs(value=100.0))["variable"]) == 3
    assert begun_in_the_middle(step) in step.loss_scaler.explain()


def norm(y, prediction):
    """A square root of a sum of squares in the model's dtype: at 0 its derivative is not finite at any scale."""
    del y
    return tf.reduce_mean(tf.cast(tf.sqrt(tf.reduce_sum(tf.square(prediction), axis=-1)), tf.float32))


def zero_model(policy):
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(2, dtype=policy, kernel_initializer="zeros")])


@second_look
def test_a_singular_derivative_is_not_called_an_overflow_though_float16_flushes_it():
    current = tf.Variable(1.0)
    loss_scaler, call = looking_again(zero_model("mixed_float16"), norm, scaler.Static(current))
    for scale, rows in itertools.product((2.0**15, 2.0**2, 2.0**100, 2.0**126), (8, 2048, 16384)):
        current.assign(scale)
        outputs = call(inputs(rows))
        assert outputs["loss_scale"] == scale
        assert Cause(int(outputs["cause"])) is Cause.BACKWARD, (scale, rows)
        assert Cause(int(loss_scaler.last_skip.cause)) is Cause.BACKWARD
        assert "no loss scale that was tried" in loss_scaler.explain()


def test_a_singular_derivative_beside_a_sound_one_is_not_said_to_be_cured_by_a_lower_scale():
    def both(y, prediction):
        return norm(y, prediction) + tf.reduce_sum(tf.cast(prediction, tf.float32))

    optimizer, loss_scaler = keras.optimizers.SGD(0.01), scaler.LossScaler()
    step = loops.TrainStep(zero_model("mixed_float16"), both, optimizer, loss_scaler=loss_scaler)
    step(inputs(16384))
    said = loss_scaler.explain()
    assert (
        "no loss scale that was tried" in said
        or "A lower scale may help; if it does not, look for non-finite data, or a square root" in said
    )


@second_look
def test_an_overflow_is_still_an_overflow():
    def steep(y, prediction):
        return 2.0**24 * tf.reduce_mean(tf.cast(prediction, tf.float32) - y)

    loss_scaler, call = looking_again(zero_model("mixed_float16"), steep, scaler.Dynamic())
    for rows in (4, 2048):
        outputs = call(inputs(rows))
        assert not outputs["finite"]
        assert Cause(int(outputs["cause"])) is Cause.OVERFLOW
        assert "A lower scale may help; if it does not, " in loss_scaler.explain()
        assert not bool(loss_scaler.last_skip.lower_helps)


@pytest.mark.usefixtures("eagerly")
def test_writers_have_the_cause_and_the_variable(tmp_path):
    x = np.ones([5, 4, 3], np.float32)
    x[2] = np.nan
    data = tf.data.Dataset.from_tensor_slices((x, np.zeros([5, 4, 2], np.float32)))
    step, _ = fresh()
    actions = [loops.JsonLines(tmp_path / "steps.jsonl"), loops.Csv(tmp_path / "steps.csv")]
    loops.Loop(step, data, steps_per_call=1, actions=actions).run(5)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    path, none = step.model.trainable_variables[5].path, (None, None)
    assert [(line["cause"], line["variable"]) for line in lines] == [none, none, ("LOSS", path), none, none]
    header, *rows = [line.split(",") for line in (tmp_path / "steps.csv").read_text().splitlines()]
    columns = header.index("cause"), header.index("variable")
    assert [tuple(row[i] for i in columns) for row in rows][1:4] == [("0", "-1"), ("1", "5"), ("0", "-1")]


def test_numbers_of_ones_own_step_are_written_as_they_are(tmp_path):
    loop = loops.Loop(
        lambda batch: {"cause": tf.cast(batch, tf.int32), "variable": tf.constant(7)},
        tf.data.Dataset.range(2),
        actions=[loops.JsonLines(tmp_path / "steps.jsonl")],
    )
    loop.run(2)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(line["cause"], line["variable"]) for line in lines] == [(0, 7), (1, 7)]


def test_a_micro_batch_that_does_not_end_a_window_has_no_cause():
    _, call = fresh(accumulate=2)
    first, second = call(inputs(value=np.nan)), call(inputs())
    assert (int(first["cause"]), int(first["variable"])) == (Cause.NONE, -1)
    assert not second["applied"]
    assert int(second["cause"]) == Cause.LOSS
    third, fourth = call(inputs()), call(inputs())
    assert not third["attempted"]
    assert (int(fourth["cause"]), int(fourth["variable"])) == (Cause.NONE, -1)


def test_a_window_names_what_its_first_bad_micro_batch_had():
    """Whichever it was: the gradients of the others are finite."""
    step, call = fresh(accumulate=2)
    for bad in range(2):
        outputs = [call(inputs(value=100.0 if number == bad else 1.0)) for number in range(2)][1]
        assert (int(outputs["cause"]), int(outputs["variable"])) == (Cause.OVERFLOW, 3)
        assert not outputs["applied"]
        assert begun_in_the_middle(step) in step.loss_scaler.explain()
        assert call(inputs())["variable"] == call(inputs())["variable"] == -1


def test_a_window_names_a_weight_that_is_not_finite():
    step, call = fresh(accumulate=2)
    kernel = step.model.layers[1].kernel
    kernel.assign(tf.fill(kernel.shape, np.nan))
    call(inputs())
    call(inputs())
    assert f"the weight {kernel.path!r} is already non-finite, and so is the loss" in step.loss_scaler.explain()
