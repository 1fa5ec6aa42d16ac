"""Guards what a trace, a report and a replay say of what was not measured, by the step that wrote the trace."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from loops.record.forecast import Alarm, Evidence
from loops.record.reading import as_recorded
from loops.replay.replay import replay
from loops.support.errors import LoopError
from loops.views.plots import headroom
from loops.views.report.write import write_report

pytestmark = pytest.mark.slow


def dataset(steps=4):
    return tf.data.Dataset.from_tensors(tf.ones([4, 3])).repeat(steps)


def model_of():
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])


def loss_of(model):
    return lambda batch: tf.reduce_mean(tf.square(tf.cast(model(batch), tf.float32) - 1.0))


def composed(joint=False, **arguments):
    critic, actor = model_of(), model_of()
    parts = [
        loops.Part("critic", critic, loss_of(critic), keras.optimizers.SGD(0.1)),
        loops.Part("actor", actor, loss_of(actor), keras.optimizers.SGD(0.1)),
    ]
    shared = {"forward": tf.identity, "loss_scaler": scaler.LossScaler()} if joint else {}
    return loops.ComposedStep(parts, **shared, **arguments)


def of_one(kinds=None, zero=False):
    model = model_of()
    if zero:
        model.layers[0].kernel.assign(tf.zeros_like(model.layers[0].kernel))
    watch = scaler.observe.watch(model, kinds=kinds or ["activations", "weight_gradients"])

    def loss(y, prediction):
        factor = 0.0 if zero else 1.0
        return factor * tf.reduce_mean(tf.square(tf.cast(prediction, tf.float32) - y))

    return loops.TrainStep(model, loss, keras.optimizers.SGD(0.1), loss_scaler=scaler.LossScaler(), probes=watch)


def run(step, folder, batches=None):
    actions = [loops.Trace(folder / "trace.arrow", every=1), loops.JsonLines(folder / "steps.jsonl")]
    loops.Loop(step, dataset() if batches is None else batches, actions=actions).run(4)
    return folder


def pairs():
    return tf.data.Dataset.from_tensors((tf.ones([4, 3]), tf.ones([4, 2]))).repeat(4)


PROBES = 'ComposedStep(..., probes={"critic": hs.observe.watch(critic), "actor": hs.observe.watch(actor)})'


def refused_replay(folder):
    """What a replay says, which names how a composed step is probed."""
    with pytest.raises(LoopError) as caught:
        replay(folder / "trace.arrow", [scaler.Static(8.0)])
    assert PROBES in str(caught.value)
    assert "TrainStep(" not in str(caught.value)
    return str(caught.value)


def test_of_a_composed_step_its_own_argument_is_named(tmp_path):
    run(composed(), tmp_path)
    assert loops.observe.read(tmp_path / "trace.arrow").parts == ("critic", "actor")
    found = as_recorded(tmp_path)
    assert found.notes == (f"The trace has no tensors. To record them, make the step {PROBES}.",)
    assert "whose parts critic, actor have a loss scaler each" in refused_replay(tmp_path)
    (tmp_path / "trace.arrow").unlink()
    (note,) = as_recorded(tmp_path).notes
    assert PROBES in note
    assert "TrainStep" not in note.replace("ComposedStep", "")
    assert "halfstep train" not in note


def test_a_replay_of_a_composed_step_with_one_scaler_names_what_it_needs(tmp_path):
    refused_replay(run(composed(joint=True), tmp_path))


def test_of_a_train_step_nothing_else_is_said(tmp_path):
    model = model_of()
    step = loops.TrainStep(
        model, keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.1), loss_scaler=scaler.LossScaler()
    )
    run(step, tmp_path, pairs())
    assert loops.observe.read(tmp_path / "trace.arrow").parts == ()
    (note,) = as_recorded(tmp_path).notes
    assert "TrainStep(..., probes=hs.observe.watch(model))" in note


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda: of_one(["weight_gradients"]), "no activations and no weights are watched"),
        (lambda: of_one(["activations"], zero=True), "all that was measured of them is zero"),
    ],
)
def test_a_headroom_that_is_not_known_is_null_and_said(step, why, tmp_path):
    run(step(), tmp_path, pairs())
    assert loops.observe.read(tmp_path / "trace.arrow").steps["headroom"].null_count == 4
    found = as_recorded(tmp_path)
    assert np.isnan(found.column("headroom")).all()
    assert [why in note for note in found.notes] == [True]
    write_report([tmp_path], tmp_path / "report.html")
    assert why in (tmp_path / "report.html").read_text()
    with pytest.raises(LoopError, match=why):
        headroom(without_gradients(found))


def without_gradients(found):
    """The run without its gradients, which have a headroom of their own."""
    columns = {name: values for name, values in found.columns.items() if not name.startswith("critical")}
    return dataclasses.replace(found, columns=columns)


def test_an_alarm_says_nothing_of_a_headroom_that_was_not_measured():
    alarm = Alarm(9, 3.0, float("nan"), 0.5, Evidence.GROWTH, 1.0, 20, float("inf"))
    assert "overflow at this loss scale. Lower" in str(alarm)
    assert "activations and weights 4." in str(alarm._replace(headroom=4.0))
