"""Guards what a model says of its layers that `emulated` and `unit_scaled` changed, also at a resume."""

import keras
import pytest
import tensorflow as tf
from models import batch, squared_error

import loops
import scaler


def small():
    layers = [keras.layers.Dense(4, activation="relu", name="first"), keras.layers.Dense(3, name="last")]
    return keras.Sequential([keras.Input([4]), *layers])


def emulated(*format, only=None, **options):
    return lambda model: scaler.formats.emulated(*format, **options)(model, only)


CHANGES = {
    "none": lambda model: model,
    "mxfp4": emulated("mxfp4"),
    "mxfp4 in one": emulated("mxfp4", only=["last"]),
    "mxfp4 at random": emulated("mxfp4", stochastic=["gradients"]),
    "in a float16 accumulator": emulated("mxfp4", accumulators="float16"),
    "e4m3": emulated("float8_e4m3fn", scaling="current"),
    "delayed": emulated("float8_e4m3fn", scaling=scaler.DelayedAmax(margin=0)),
    "delayed with a margin": emulated("float8_e4m3fn", scaling=scaler.DelayedAmax(margin=3)),
    "unit": scaler.formats.unit_scaled,
}


def test_each_change_has_words_of_its_own():
    found = {}
    for name, change in CHANGES.items():
        model = small()
        change(model)
        found[name] = scaler.formats.changed(model)
    assert found["none"] == {}
    assert list(found["mxfp4 in one"]) == ["last"]
    assert "format='mxfp4'" in found["mxfp4"]["first"]
    assert found["unit"] == {"first": "unit_scaled", "last": "unit_scaled"}
    assert len({str(one) for one in found.values()}) == len(CHANGES)


def test_what_is_only_tried_is_no_change():
    model = small()
    with scaler.formats.emulated("mxfp4").tried(model):
        assert scaler.formats.changed(model) == {}


def run(name, folder):
    """A run of one step, which goes on from the checkpoint where there is one."""
    keras.backend.clear_session()
    tf.config.run_functions_eagerly(True)
    model = CHANGES[name](small())
    step = loops.TrainStep(model, squared_error, keras.optimizers.SGD(0.1))
    data = tf.data.Dataset.from_tensors(batch()).repeat()
    actions = [loops.Checkpoint(folder, every=1, resume=True)]
    loops.Loop(step, data, steps_per_call=1, actions=actions).run(1)


def test_only_a_resumed_run_in_another_format_says_so(tmp_path, recwarn):
    for _ in range(2):
        run("mxfp4 in one", tmp_path)
    assert [one for one in recwarn if issubclass(one.category, loops.ResumeWarning)] == []
    with pytest.warns(loops.ResumeWarning, match="formats.of products was .* and is .*"):
        run("none", tmp_path)
