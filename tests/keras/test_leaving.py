"""Guards the way back: Keras alone reads what was saved here, and trains on from there, as docs/stability.md says."""

import functools

import keras
import numpy as np
import pytest

import scaler

L = keras.layers
X = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_model(policy):
    keras.utils.set_random_seed(0)
    norm = L.BatchNormalization(dtype=policy)
    head = L.Dense(2, dtype="float32")
    return keras.Sequential([L.Input((16,)), L.Dense(8, activation="relu", dtype=policy), norm, head])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """From a policy to a model that was trained, and its file."""

    @functools.cache
    def make(policy):
        model = make_model(policy)
        model.compile(scaler.LossScaleOptimizer(keras.optimizers.Adam(1e-3)), loss=LOSS, jit_compile=False)
        scaler.protect(model).fit(X, Y, epochs=2, verbose=0)
        path = tmp_path_factory.mktemp("trained") / "model.keras"
        model.save(path)
        return model, path

    return make


@pytest.mark.slow_with("float16-mixed_bfloat16", "mixed_float16-mixed_float16")
@pytest.mark.parametrize(("saved", "there"), [("mixed_float16", "mixed_float16"), ("float16", "mixed_bfloat16")])
def test_weights_load_into_a_model_of_keras_alone(trained, saved, there):
    model, path = trained(saved)
    plain = make_model(there)
    plain.load_weights(path)
    for ours, theirs in zip(model.weights, plain.weights, strict=True):
        assert theirs.dtype == "float32"
        np.testing.assert_array_equal(np.float32(ours.numpy()), theirs.numpy())
    whole = keras.saving.load_model(path, compile=False)
    np.testing.assert_array_equal(*(one(X, training=False) for one in (whole, model)))
    optimizer = keras.optimizers.Adam(1e-3)
    scaled = keras.optimizers.LossScaleOptimizer(optimizer) if there == "mixed_float16" else optimizer
    plain.compile(scaled, loss=LOSS, jit_compile=False)
    losses = plain.fit(X, Y, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_the_optimizer_inside_goes_on_in_the_scaler_of_keras(trained, tmp_path):
    model = keras.saving.load_model(trained("mixed_float16")[1])
    inner = model.optimizer.inner_optimizer
    model.compile(keras.optimizers.LossScaleOptimizer(inner), loss=LOSS, jit_compile=False)
    model.fit(X, Y, verbose=0)  # Keras loads no wrapper that was saved before it was built.
    slots = [variable.numpy() for variable in inner.variables]
    assert int(inner.iterations) == 6
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is keras.optimizers.LossScaleOptimizer
    for before, variable in zip(slots, loaded.optimizer.inner_optimizer.variables, strict=True):
        np.testing.assert_array_equal(before, variable.numpy())
    loaded.fit(X, Y, verbose=0)
    assert int(loaded.optimizer.inner_optimizer.iterations) == 8
