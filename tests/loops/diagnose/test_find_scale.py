"""Guards the scale that is found from a few batches: at it nothing overflows, twice the critical one does."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import squared_error

import loops
import scaler

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
    found = loops.observe.find_scale(model, data, squared_error, batches=6)
    for was, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), was)
    assert (found.static, found.start, found.batches) == (found.critical / 8, found.critical / 2, 6)
    assert set(found.formats.values()) == {"float16"}
    if kind == "mixed_float16":
        assert applied(model, data, found.critical)
        assert not applied(model, data, found.critical * 2)


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
    given = {"model": model_of("float32"), "data": data.take(1), "loss_fn": squared_error, **arguments}
    with pytest.raises(error, match=said):
        loops.observe.find_scale(**given)
