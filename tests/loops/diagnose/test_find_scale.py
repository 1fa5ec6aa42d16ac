"""Guards the scale that is found from a few batches: at it nothing overflows, twice the critical one does."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from loop_cases import line
from models import squared_error
from replay_cases import tables

import loops
import scaler
from loops.diagnose import find_scale

pytestmark = pytest.mark.slow


def model_of(kind, factor=1.0):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input([4]),
            keras.layers.Dense(8, name="first", dtype=kind),
            keras.layers.BatchNormalization(name="normal", dtype=kind),
            keras.layers.Rescaling(factor, name="large", dtype=kind),
            keras.layers.Rescaling(1 / factor, name="small", dtype=kind),
            keras.layers.Dense(1, name="last", dtype=kind),
        ]
    )


@pytest.fixture(scope="module")
def data():
    x = np.random.default_rng(0).normal(size=(96, 4)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(16)


def applied(model, data, scale):
    """Whether all batches are finite at a scale."""
    step = loops.TrainStep(
        model, squared_error, keras.optimizers.SGD(0.0), loss_scaler=scaler.LossScaler(scaler.Static(scale))
    )
    graph = tf.function(step)
    return all(bool(graph(batch)["applied"]) for batch in data)


@pytest.mark.exhaustive_with("mixed_float16")
@pytest.mark.parametrize("kind", ["float32", "mixed_float16"])
def test_the_scale_is_the_largest_that_does_not_overflow(data, kind):
    model = model_of(kind)
    before = [variable.numpy().copy() for variable in model.variables]
    found = loops.observe.find_scale(model, data, squared_error, batches=3)
    for was, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), was)
    assert (found.static, found.start, found.batches) == (None, found.critical / 2, 3)
    assert set(found.formats.values()) == {"float16"}
    if kind == "mixed_float16":
        assert applied(model, data.take(3), found.critical)
        assert not applied(model, data.take(3), found.critical * 2)


@pytest.mark.exhaustive
def test_a_static_scale_comes_from_whole_runs_alone(data):
    """The run's gradients grow to many times those of the measured batches."""
    run = tables([1.0, 2.0, 40.0, 40.0])
    found = loops.observe.find_scale(model_of("float32"), data.take(1), squared_error, runs=run)
    assert (found.static, found.runs) == (2.0**10 / 8, 1)
    assert "static 128, at which 1 recorded run" in str(found)
    skipped = tables([1.0, 1e4, 1.0], scale=2.0**8)
    found = loops.observe.find_scale(model_of("float32"), data.take(1), squared_error, runs=[run, skipped])
    assert (found.static, found.runs) == (None, 2)
    assert "no static scale: at each, one of 2 recorded runs may skip more than 1%" in str(found)
    found = loops.observe.find_scale(model_of("float32"), data.take(1), squared_error)
    assert "no static scale: a few batches do not say" in str(found)
    assert "(1 batch)" in str(found)
    assert "(2 batches)" in str(dataclasses.replace(found, batches=2))


def test_a_layer_that_float16_does_not_hold(data):
    found = loops.observe.find_scale(model_of("float32", 2.0**20), data, squared_error)
    assert found.formats == {
        "first": "float16",
        "normal": "float16",
        "large": "bfloat16",
        "small": found.formats["small"],
        "last": "float16",
    }
    assert "large" in str(found)


@pytest.mark.exhaustive_with("arguments5-LoopError-gradients are zero")
@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"model": 3}, scaler.InvalidArgument, "expected a keras.Model"),
        ({"batches": 0}, scaler.InvalidArgument, "integer of at least 1"),
        ({"model": keras.Sequential([keras.layers.Dense(1)])}, scaler.InvalidArgument, "no variables yet"),
        ({"data": []}, loops.OutOfData, "no batch"),
        ({"loss_fn": lambda y, p: squared_error(y, p) * np.inf}, loops.LoopError, "finite gradients"),
        ({"loss_fn": lambda y, p: squared_error(y, p) * 0.0}, loops.LoopError, "gradients are zero"),
    ],
)
def test_what_cannot_be_found(data, arguments, error, said):
    given = {"model": line(), "data": data.take(1), "loss_fn": squared_error, **arguments}
    with pytest.raises(error, match=said):
        loops.observe.find_scale(**given)


@pytest.mark.exhaustive
def test_a_batch_that_is_not_finite_is_left_out_and_named(data):
    """No format holds a NaN: the layers' formats are those of the other batches. Batches of arrays are taken, too."""
    batches = [tuple(part.numpy() for part in batch) for batch in data]
    batches[1][0][3, 2] = np.nan
    without = loops.observe.find_scale(model_of("mixed_float16"), [batches[0], *batches[2:4]], squared_error)
    found = loops.observe.find_scale(model_of("mixed_float16"), batches, squared_error, batches=4)
    assert (found.left_out, found.batches, found.critical) == ((2,), 3, without.critical)
    assert (found.formats, without.left_out) == (without.formats, ())
    assert "left out: batch 2, with values that are not finite" in str(found)
    assert "left out" not in str(without)
    with pytest.raises(loops.LoopError, match="all batches that it looked at, 1, hold values that are not finite"):
        loops.observe.find_scale(model_of("mixed_float16"), batches[1:2], squared_error)


@pytest.mark.exhaustive
def test_small_gradients_are_measured_where_float16_does_not_hide_them(data):
    """Measured at one scale, all but the last layer's are zero."""
    weight = 1e-30
    model = model_of("mixed_float16")
    usual = loops.observe.find_scale(model, data, squared_error, batches=2)
    found = loops.observe.find_scale(model, data, lambda y, p: weight * squared_error(y, p), batches=2)
    assert np.log2(found.critical / usual.critical) == pytest.approx(-np.log2(weight), abs=1)
    for one, same in zip(found.layers, usual.layers, strict=True):
        assert one.gradient == pytest.approx(weight * same.gradient, rel=0.05)
    assert "no room within the default max_scale" not in str(usual)
    assert (usual.dynamic, found.dynamic.initial_scale) == (scaler.Dynamic(usual.start), found.start)
    (line,) = [line for line in str(found).splitlines() if "no room within the default max_scale" in line]
    strategy = eval(line.partition(": ")[2], {"hs": scaler})
    assert (strategy.initial_scale, strategy.max_scale > found.critical) == (found.start, True)
    assert strategy == found.dynamic


@pytest.mark.parametrize("exponent", [-126, -40, -15, -14, 0, 40, 41, 82, 125])
def test_a_start_anywhere_can_be_used_as_it_is_printed(exponent):
    found = find_scale.FoundScale(2.0 ** min(exponent + 1, 126), 2.0**exponent, 2.0**exponent, 1, ())
    strategy = found.dynamic
    assert strategy.initial_scale == found.start
    assert strategy.min_scale <= found.start / 2 or exponent == -126
    assert strategy.max_scale >= found.start * 2
    lines = [line for line in str(found).splitlines() if "Dynamic(" in line]
    printed = [eval(line.partition(": ")[2], {"hs": scaler}) for line in lines]
    assert printed == ([] if -14 < exponent < 40 else [strategy])


def test_a_batch_without_gradients_does_not_move_where_the_next_is_measured(data):
    """Its scale is raised as far as it goes, and tells nothing of the others."""
    x, y = next(iter(data))

    def loss(y, prediction):
        return squared_error(y, prediction) * tf.reduce_mean(tf.abs(y))

    model = line("mixed_float16")
    found = loops.observe.find_scale(model, [(x, y * 0), (x, y)], loss)
    assert found.critical == loops.observe.find_scale(model, [(x, y)], loss).critical
