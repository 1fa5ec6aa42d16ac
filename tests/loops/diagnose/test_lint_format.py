"""Guards `lint(format=...)`: it names the layers that a narrower format spoils, and leaves the model as it was."""

import keras
import numpy as np
import pytest

import scaler
from loops.diagnose.lint.subject import Kind
from loops.observe import lint

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model_of(outlier):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input([64]),
            keras.layers.Dense(32, activation="tanh", name="first"),
            keras.layers.Dropout(0.2, seed=1),
            keras.layers.Dense(4, name="second", dtype="mixed_float16"),
        ]
    )
    if outlier:
        # Of an input that is always zero: in float32 it changes nothing, and it takes the scale from all other weights.
        kernel = model.layers[0].kernel.numpy()
        kernel[0] = 1e6
        model.layers[0].kernel.assign(kernel)
    return model


def sample():
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal([32, 64]).astype(np.float32), rng.integers(0, 4, 32)
    images[:, 0] = 0.0
    return images, labels  # Labels at random: the noise is as large as the gradients, and no limit alone.


def found(outlier, format):
    model = model_of(outlier)
    before = [variable.numpy() for variable in model.variables]
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD())
    findings = [one for one in lint(model, optimizer, LOSS, sample(), format=format) if one.kind is Kind.FORMAT]
    assert all(np.array_equal(one, two.numpy()) for one, two in zip(before, model.variables, strict=True))
    assert model.layers[-1].compute_dtype == "float16"
    assert not any("call" in vars(layer) for layer in model.layers)
    return findings


@pytest.mark.slow
@pytest.mark.usefixtures("unstressed")
def test_a_layer_whose_weights_are_flushed_is_named_and_the_other_is_noted():
    worse, rest = found(True, "float8_e4m3fn")
    assert (worse.layer, worse.is_note) == ("first", False)
    assert "first" not in rest.measured
    assert rest.is_note
    assert "second" in rest.measured


def test_another_format_is_refused_first():
    with pytest.raises(scaler.InvalidArgument, match="float8"):
        lint(None, None, None, None, format="float8")


@pytest.mark.exhaustive
def test_a_model_that_is_emulated_can_be_linted():
    model = scaler.formats.emulated("float8_e4m3fn")(model_of(False))
    before = [variable.numpy() for variable in model.variables]
    assert not [one for one in lint(model, keras.optimizers.SGD(), LOSS, sample()) if one.layer == "first"]
    assert all(np.array_equal(one, two.numpy()) for one, two in zip(before, model.variables, strict=True))
