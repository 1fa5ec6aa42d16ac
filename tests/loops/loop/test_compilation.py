"""Guards `Loop(jit_compile="auto")`: as Keras's `fit` decides, with a sentence where XLA cannot compile the step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored
from models import squared_error

import loops
import scaler
from loops.backend import xla
from loops.loop import compilation as compiled

DATA = (
    tf.data.Dataset.from_tensor_slices((np.ones([32, 4], np.float32), np.ones([32, 1], np.float32))).batch(8).repeat()
)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(compiled, "has_gpu", lambda: True)


def step(layer=None, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), layer or keras.layers.Dense(1, dtype="mixed_float16")])
    return loops.TrainStep(model, squared_error, keras.optimizers.SGD(0.01), loss_scaler=scaler.LossScaler(), **options)


def cheap(x, y):
    return {"loss": tf.reduce_sum(x)}


def compiles(loop):
    loop.run(2)
    return loop.calls.jit_compile


@pytest.mark.slow_with("1")
@pytest.mark.exhaustive_with("2")
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_step_is_compiled_on_a_gpu(gpu, steps_per_call):
    loop = loops.Loop(step(), DATA, steps_per_call=steps_per_call)
    assert compiles(loop)
    named = loops.Loop(step(), DATA, steps_per_call=steps_per_call, jit_compile=True)
    assert compiles(named)
    weights = [one.train_step.model.trainable_variables[0].numpy() for one in (loop, named)]
    np.testing.assert_array_equal(*weights)


def test_a_step_is_not_compiled_on_a_cpu():
    assert not compiles(loops.Loop(cheap, DATA))


def test_what_was_asked_for_is_done(gpu):
    assert compiles(loops.Loop(cheap, DATA, steps_per_call=1))
    assert not compiles(loops.Loop(cheap, DATA, steps_per_call=1, jit_compile=False))


def test_a_step_that_compiles_its_passes_is_left_alone(gpu):
    assert not compiles(loops.Loop(step(jit_compile=True), DATA, steps_per_call=1))


@pytest.mark.slow
def test_replicas_and_determinism_are_as_in_fit(gpu, monkeypatch):
    strategy = mirrored(2)
    with strategy.scope():
        made = step()
    assert not compiles(loops.Loop(made, DATA, strategy=strategy))
    monkeypatch.setattr(compiled, "is_deterministic", lambda: True)
    assert not compiles(loops.Loop(step(), DATA))


def test_an_operation_without_a_kernel_is_named(gpu):
    def own(x, y):
        return {"loss": tf.ensure_shape(tf.py_function(lambda value: value[0, 0], [x], tf.float32), [])}

    loop = loops.Loop(own, DATA, steps_per_call=2)
    with pytest.warns(UserWarning, match="no kernel for EagerPyFunc.*It runs without XLA"):
        assert not compiles(loop)
    assert loop.counters.data == 2


def test_a_layer_that_says_no_is_named(gpu):
    layer = keras.layers.Dense(1, name="stubborn")
    layer.supports_jit = False
    with pytest.warns(UserWarning, match="its layer 'stubborn' says so"):
        assert not compiles(loops.Loop(step(layer=layer), DATA, steps_per_call=1))


@pytest.mark.slow
def test_a_release_that_does_not_list_kernels_runs_without(gpu, monkeypatch):
    from tensorflow.python.framework import kernels

    monkeypatch.delattr(kernels, "get_registered_kernels_for_op")
    assert xla.not_for_xla(tf.function(lambda: tf.constant(1)).get_concrete_function()) is None
    with pytest.warns(UserWarning, match="does not list the kernels"):
        assert not compiles(loops.Loop(step(), DATA, steps_per_call=1))


@pytest.mark.parametrize("value", [1, 0, None, "AUTO", "yes"])
def test_another_value_is_refused(value):
    with pytest.raises(scaler.InvalidArgument, match=r'expected True, False or "auto"'):
        loops.Loop(step(), DATA, jit_compile=value)
