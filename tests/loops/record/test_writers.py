"""Guards what actions write: cadence, CSV, curves, profiles, and files that a kill leaves whole."""

import csv
import json
import math
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from processes import kill_when
from tensorboard_cases import descriptions, events

import loops
import loops.loop.visit

VALUES = [1.0, math.nan, -math.inf, 4.0, 5.0, 6.0, 7.0]


def looping(*actions, steps_per_call=3):
    def step(value):
        return {"loss": value, "applied": value != 4.0, "loss_scale": tf.constant(2.0**-3)}

    data = tf.data.Dataset.from_tensor_slices(np.float32(VALUES))
    return loops.Loop(step, data, steps_per_call=steps_per_call, actions=actions)


def visit(first, last, seconds=0.0):
    return loops.Visit(loops.Counters(last, last, last), {"loss": np.arange(first, last + 1)}, seconds, 100)


def test_a_cadence_in_steps_is_that_of_their_multiples():
    cadence = loops.loop.visit.Cadence("A", 4)
    assert [cadence.due(visit(*one)) for one in [(1, 3), (4, 6), (7, 7), (8, 8), (9, 17), (18, 19)]] == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]
    # The first visit of a resumed run, and one after a call that broke off at step 8.
    assert loops.loop.visit.Cadence("A", 4).due(visit(9, 11)) is False
    cadence = loops.loop.visit.Cadence("A", 4)
    assert [cadence.due(visit(5, 6)), cadence.due(visit(9, 9))] == [False, True]
    assert loops.loop.visit.Cadence("A", 4).rows(visit(3, 9)) == [1, 5]


def test_a_cadence_in_seconds_starts_anew_with_each_run():
    cadence = loops.loop.visit.Cadence("A", loops.Seconds(10))
    times = [3.0, 10.0, 19.9, 20.5, 4.0, 10.0]
    assert [cadence.due(visit(1, 1, seconds)) for seconds in times] == [False, True, False, True, False, True]
    assert loops.loop.visit.Cadence("A", loops.Seconds(0)).rows(visit(3, 9)) == [6]


def test_a_function_is_called_at_its_cadence():
    seen = []
    looping(loops.Call(lambda visit: seen.append(visit.counters.data), every=4)).run(7)
    assert seen == [6]


@pytest.mark.usefixtures("eagerly")
def test_csv_has_a_header_and_every_step(tmp_path):
    path = tmp_path / "made" / "steps.csv"
    loop = looping(loops.Csv(path))
    loop.run(4)
    loop.run(7)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert path.read_text().splitlines()[:4] == [
        "step,applied,loss,loss_scale",
        "1,1,1.0,0.125",
        "2,1,nan,0.125",
        "3,1,-inf,0.125",
    ]
    assert [int(row["step"]) for row in rows] == list(range(1, 8))
    np.testing.assert_equal([float(row["loss"]) for row in rows], VALUES)
    looping(loops.Csv(path, every=3)).run(7)
    assert [row["step"] for row in csv.DictReader(path.read_text().splitlines())] == ["3", "6"]


def test_csv_refuses_a_step_and_the_columns_of_another_run(tmp_path):
    loop = loops.Loop(
        lambda value: {"step": value}, tf.data.Dataset.range(3), actions=[loops.Csv(tmp_path / "steps.csv")]
    )
    with pytest.raises(loops.BadOutputs, match="'step'"):
        loop.run(1)
    (tmp_path / "steps.csv").write_text("step,other\n1,2\n")
    action = loops.Csv(tmp_path / "steps.csv")
    action.load_state({"step": 1, "line": 0})
    with pytest.raises(loops.LoopError, match="step,other"):
        looping(action).run(3)


def real_run(folder, *actions, **arguments):
    keras.utils.set_random_seed(1)
    # Keras would count the models of this process in their names.
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, name="dense")], name="model")
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5, staircase=True))
    step = loops.TrainStep(model, lambda y, prediction: tf.reduce_mean(tf.square(prediction - y)), optimizer)
    x = np.float32([[1, 2], [3, 1], [np.inf, 1], [1, 1], [2, 2], [1, 0]])
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(1)
    clean = tf.data.Dataset.from_tensor_slices((x[:2], x[:2, :1])).batch(1)
    evaluate = loops.Evaluate(model, clean, [keras.metrics.MeanSquaredError(name="mse")], every=2)
    board = loops.TensorBoard(folder / "tb", every=1)
    lines = [loops.Csv(folder / "steps.csv"), loops.JsonLines(folder / "steps.jsonl")]
    checkpoint = loops.Checkpoint(folder / "ckpt", every=100, **arguments)
    return loops.Loop(step, data, steps_per_call=1, actions=[evaluate, board, *lines, *actions, checkpoint])


@pytest.mark.slow
def test_curves_are_those_of_the_run(tensorboard, tmp_path):
    real_run(tmp_path).run(6)
    curves = events(tmp_path / "tb")
    written = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert set(curves) == {
        "loss",
        "gradient/global_norm",
        "gradient/clipped_norm",
        "step/applied",
        "scaler/log2_scale",
        "scaler/skipped",
        "optimizer/learning_rate",
        "time/steps_per_second",
        "validation/mse",
        "scaler/skips",
    }
    (line,) = (line for line in written if line["cause"])
    assert curves["scaler/skips"] == [(3, f"LOSS: {line['variable']}")]
    assert {tag for tag, said in descriptions(tmp_path / "tb").items() if not said} == {"validation/mse"}
    for tag, name in (("loss", "loss"), ("gradient/global_norm", "grad_norm")):
        finite = [line[name] if line[name] is not None else math.inf for line in written]
        got = [value if math.isfinite(value) else math.inf for _, value in curves[tag]]
        np.testing.assert_allclose(got, finite, rtol=1e-6)
    assert curves["scaler/skipped"] == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 1)]
    assert curves["optimizer/learning_rate"] == [(1, 0.5), (2, 0.25), (3, 0.25), (4, 0.25), (5, 0.125), (6, 0.125)]
    assert [step for step, _ in curves["validation/mse"]] == [2, 4, 6]
    assert all(value == 0.0 for _, value in curves["scaler/log2_scale"])
    assert [step for step, _ in curves["time/steps_per_second"]] == [2, 3, 4, 5, 6]
    looping(loops.TensorBoard(tmp_path / "other", every=2)).run(7)
    assert events(tmp_path / "other")["scaler/log2_scale"] == [(2, -3.0), (4, -3.0), (6, -3.0)]


def without_time(folder):
    return {tag: str(points) for tag, points in events(folder).items() if not tag.startswith("time")}


@pytest.mark.exhaustive
def test_files_of_a_run_that_goes_on_are_those_of_the_whole_one(tensorboard, tmp_path):
    """The first run went on after its checkpoint, and was then killed in the middle of a record and of a line."""
    real_run(tmp_path / "whole").run(6)
    place = tmp_path / "stopped"
    loop = real_run(place)
    loop.run(3)
    loop.actions.pop()  # Steps that no checkpoint has.
    loop.run(5)
    for path in (*(place / "tb").iterdir(), place / "steps.csv", place / "steps.jsonl"):
        path.write_bytes(path.read_bytes()[:-3])
    real_run(place, resume=True).run(6)
    assert without_time(place / "tb") == without_time(tmp_path / "whole" / "tb")
    for name in ("steps.csv", "steps.jsonl"):
        assert (place / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_without_tensorboard_a_warning_says_what_to_install(tensorboard, tmp_path):
    tensorboard(installed=False)
    with pytest.warns(UserWarning, match=r'pip install "halfstep\[tensorboard\]"'):
        looping(loops.TensorBoard(tmp_path, every=1)).run(3)
    assert events(tmp_path)["loss"][0][0] == 1


@pytest.mark.parametrize(("first", "at_six"), [(3, 2), (5, 2), (7, 0)])
def test_a_window_is_profiled_once(monkeypatch, tmp_path, first, at_six):
    """Also one that the end of a run cuts short."""
    called = []
    monkeypatch.setattr(tf.profiler.experimental, "start", lambda place: called.append("start"))
    monkeypatch.setattr(tf.profiler.experimental, "stop", lambda: called.append("stop"))
    loop = looping(loops.Profile(tmp_path, first=first, steps=2), steps_per_call=1)
    loop.run(6)
    assert len(called) == at_six
    loop.run(7)
    assert called == ["start", "stop"]


def test_the_profiler_writes_a_trace(tmp_path):
    looping(loops.Profile(tmp_path, first=1, steps=2), steps_per_call=1).run(7)
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))


def test_a_second_profiler_is_one_clear_error(tmp_path):
    loop = looping(loops.Profile(tmp_path, first=1), loops.Profile(tmp_path, first=1), steps_per_call=1)
    with pytest.raises(loops.LoopError, match="did not start"):
        loop.run(3)


def write_for_ever(folder):
    data = tf.data.Dataset.range(1, 10**9).map(lambda number: tf.cast(number, tf.float32))
    actions = [loops.Csv(folder / "steps.csv"), loops.JsonLines(folder / "steps.jsonl")]
    loops.Loop(lambda value: {"loss": value / 3, "wide": value}, data, steps_per_call=500, actions=actions).run(10**9)


@pytest.mark.slow
def test_a_kill_loses_no_line_that_a_visit_had_written(tmp_path):
    path = tmp_path / "steps.jsonl"
    kill_when(lambda: path.exists() and path.stat().st_size >= 300_000, write_for_ever, tmp_path)
    counts = []
    for name, number in (
        ("steps.csv", lambda line: int(line.split(",")[0])),
        ("steps.jsonl", lambda line: json.loads(line)["step"]),
    ):
        lines = (tmp_path / name).read_text().split("\n")[:-1]
        steps = [number(line) for line in lines if not line.startswith("step")]
        assert steps == list(range(1, len(steps) + 1))
        counts.append(len(steps))
    # All lines of the visits before, and Csv acts first.
    assert 0 <= counts[0] - counts[1] <= 500
    assert counts[1] > 4_000


@pytest.mark.parametrize("writer", [loops.Csv, loops.JsonLines])
def test_a_device_that_takes_nothing_is_told_and_not_read_to_its_end(writer):
    if not pathlib.Path("/dev/full").exists():
        pytest.skip("this system has no device that is always full")
    with pytest.raises(loops.NotWritable, match=r"No space left on device.*Step 1 is missing there"):
        looping(writer("/dev/full")).run(1)
