"""What is saved goes on bit for bit after loading: `.keras`, weights, `tf.train.Checkpoint`, in another process too."""

import dataclasses
import sys
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_cases import SCALE, compiled, data, everything, overflowing
from processes import start
from rigs import raw

import scaler
from scaler.strategies import Bounded, Scheduled, Warmup

STRATEGIES = {
    "keras": None,
    "headroom": scaler.Headroom(),
    "nested": Warmup(Bounded(scaler.Dynamic(growth_interval=2), 2.0**-4, 2.0**10), steps=3),
    "scheduled": Scheduled({0: scaler.Static(8.0), 2: scaler.DelayedAmax()}),
    "preset": scaler.presets.pytorch(growth_interval=3),
    "preset in a preset": scaler.presets.nemo() if hasattr(scaler.presets, "nemo") else scaler.NoScaling(),
}
ALL = {"use_ema": True, "clipnorm": 0.1, "weight_decay": 0.01, "gradient_accumulation_steps": 4}


def inner(**arguments):
    return keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(1e-2, 3, 0.9), **arguments)


def small(policy="mixed_float16", inner=None, strategy=None, **arguments):
    """Without dropout: Keras does not save seed generators."""
    return compiled(policy, inner, strategy, stateful=False, protect=False, **arguments)


def go_on(model):
    """What it comes to after some more steps."""
    model.reset_metrics()
    logs = [model.train_on_batch(*data(8, seed)) for seed in range(6)]
    # No file holds why a window is spoiled that it was saved in: its skip names the first variable then.
    for variable in model.optimizer.loss_scaler.variables:
        if "last_skip" in variable.name:
            variable.assign(tf.zeros_like(variable))
    return logs, everything(model)


def test_training_goes_on_bit_for_bit(tmp_path):
    """With averages, after a skipped step and in the middle of a window."""
    model, weights, restored = (small("float16", inner(**ALL), run_eagerly=True) for _ in range(3))
    for batch in (*[data(8)] * 5, overflowing()):
        model.train_on_batch(*batch)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "checkpoint"))
    wanted = go_on(model)

    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is scaler.LossScaleOptimizer
    assert go_on(loaded) == wanted

    weights.optimizer.build(weights.trainable_variables)
    weights.load_weights(tmp_path / "model.weights.h5")
    assert go_on(weights) == wanted

    status = tf.train.Checkpoint(model=restored, optimizer=restored.optimizer).read(saved)
    assert go_on(restored) == wanted
    status.assert_existing_objects_matched()


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_configuration_holds_the_strategy(strategy):
    optimizer = scaler.LossScaleOptimizer(inner(), strategy)
    config = keras.saving.serialize_keras_object(optimizer)
    again = keras.optimizers.get(keras.src.saving.serialization_lib.deserialize_keras_object(config))
    assert type(again) is scaler.LossScaleOptimizer
    assert again.loss_scaler.strategy == optimizer.loss_scaler.strategy
    assert again.get_config() == optimizer.get_config()


def test_arguments_of_keras_come_back_as_these():
    config = scaler.LossScaleOptimizer(inner(), initial_scale=64.0, dynamic_growth_steps=7).get_config()
    assert (config["initial_scale"], config["dynamic_growth_steps"]) == (64.0, 7)
    assert scaler.LossScaleOptimizer.from_config(config).loss_scaler.strategy == scaler.Dynamic(64.0, growth_interval=7)


class OnlyDownState(NamedTuple):
    loss_scale: tf.Tensor


@dataclasses.dataclass(frozen=True)
class OnlyDown:
    """A strategy of somebody else."""

    first: float = 2.0**10

    def init(self):
        return OnlyDownState(tf.constant(self.first))

    def update(self, state, event):
        return OnlyDownState(tf.where(event.finite, state.loss_scale, tf.maximum(state.loss_scale / 2.0, 1.0)))


def test_a_file_does_not_choose_what_is_imported():
    config = scaler.LossScaleOptimizer(inner(), scaler.Static(2.0)).get_config()
    sys.modules.pop("this", None)
    with pytest.raises(scaler.InvalidArgument, match="strategy 'Static', which is not known here"):
        scaler.LossScaleOptimizer.from_config({**config, "strategy": {**config["strategy"], "module": "this"}})
    assert "this" not in sys.modules


def modules_in(config):
    """The values of every "module" in a configuration."""
    inside = list(config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ())
    return {value for key, value in inside if key == "module"}.union(*(modules_in(value) for _, value in inside))


def test_files_hold_public_names(tmp_path):
    strategies = {0: scaler.presets.deepspeed(), 5: Bounded(scaler.presets.fairseq(), 1.0, 2.0**20)}
    model = small(strategy=Warmup(Scheduled(strategies), 3))
    model.optimizer.build(model.trainable_variables)
    model.optimizer.loss_scaler.update(scaler.Event(tf.constant(True)))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.loss_scaler.strategy == Warmup(Scheduled(strategies), 3)
    assert raw(loaded.weights) == raw(model.weights)
    assert loaded.optimizer.loss_scaler.counters.applied == 1
    assert modules_in(loaded.optimizer.get_config()["strategy"]) == {"scaler.strategies", "scaler.presets.rules"}


def test_what_cannot_be_written_down_is_named():
    class Plain:
        def init(self):
            return OnlyDownState(tf.constant(1.0))

        def update(self, state, event):
            return state

    with pytest.raises(scaler.InvalidArgument, match="is not a dataclass"):
        scaler.LossScaleOptimizer(inner(), Plain()).get_config()
    with pytest.raises(scaler.InvalidArgument, match=r"OnlyDown.first=.*cannot be saved"):
        scaler.keras.arguments.to_config(OnlyDown(first=print))


def load_and_go_on(path):
    """In a process that has not used TensorFlow yet; what it comes to is left beside the model."""
    model = keras.saving.load_model(path)
    model.train_on_batch(*data(8))
    path.with_suffix(".bits").write_bytes(b"".join(everything(model)))


def test_a_model_goes_on_in_a_new_process(tmp_path):
    path = tmp_path / "model.keras"
    model = small(strategy=scaler.Dynamic(SCALE, growth_interval=2))
    for _ in range(3):
        model.train_on_batch(*data(8))
    model.save(path)
    process = start(load_and_go_on, path)
    model.train_on_batch(*data(8))
    process.join(300)
    assert path.with_suffix(".bits").read_bytes() == b"".join(everything(model))


@pytest.mark.slow
def test_a_model_saved_without_its_optimizer_gets_new_masters(tmp_path):
    model = small("float16")
    model.save(tmp_path / "model.keras", include_optimizer=False)
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=SCALE)
    loaded.compile(optimizer, loss="mse", jit_compile=False)
    loaded.train_on_batch(*data(8))
    assert raw(loaded.weights) == raw(model.weights)


@pytest.mark.slow
def test_an_hdf5_file_holds_the_weights_and_the_optimizer_starts_anew(tmp_path):
    """Keras builds the optimizer of a loaded HDF5 file for no variables, whichever it is."""
    model = small("float16")
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=SCALE)
    model.compile(optimizer, loss=keras.losses.MeanSquaredError(), jit_compile=False)
    model.train_on_batch(*data(8))
    model.save(tmp_path / "model.h5")
    loaded = keras.saving.load_model(tmp_path / "model.h5")
    for one, other in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    loaded.train_on_batch(*data(8))
    assert int(loaded.optimizer.iterations) == int(loaded.optimizer.loss_scaler.counters.applied) == 1
