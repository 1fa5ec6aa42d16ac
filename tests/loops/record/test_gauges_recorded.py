"""Guards what ready probes measure on its way: into a trace, a resumed trace, TensorBoard and a report."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import squared_error
from tensorboard_cases import descriptions, events

import loops
from loops.record import as_recorded
from loops.record.trace.visit_columns import Averages, gauges_of
from scaler import observe

GAUGES = {
    "attention_logit": ["block/attention"],
    "attention_entropy": ["block/attention"],
    "update_rms": ["dense", "block/attention/query"],
    "update_ratio": ["dense", "block/attention/query"],
    "noise_scale": ["noise", "signal"],
}
NAMES = [f"{output}/{name}" for output, names in GAUGES.items() for name in names]


def train_step(gauges=GAUGES):
    """What actions ask of a train step with ready probes alone."""
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    return types.SimpleNamespace(probes=types.SimpleNamespace(names=[], gauges=gauges, model=model, dtypes={}))


def value(step, place):
    """What is measured at every second step."""
    return step + place / 8 if step % 2 == 0 else np.nan


def visit(first, last):
    steps = np.arange(first, last + 1)
    outputs = {"loss": 1.0 / steps, "applied": np.ones(len(steps), bool), "loss_scale": np.full(len(steps), 2.0**10)}
    vectors = {"counts": np.zeros([len(steps), 0, 280], np.int64), "amax": np.zeros([len(steps), 0], np.float32)}
    for output, names in GAUGES.items():
        places = [NAMES.index(f"{output}/{name}") for name in names]
        vectors[output] = np.array([[value(step, place) for place in places] for step in steps], np.float32)
    return loops.Visit(loops.Counters(last, last, last), outputs, 0.0, last, vectors)


def write(action, ends=(5, 12), gauges=GAUGES):
    action.begin(types.SimpleNamespace(train_step=train_step(gauges), actions=[]))
    with action:
        for before, last in zip([0, *ends[:-1]], ends, strict=True):
            action(visit(before + 1, last))


@pytest.fixture
def path(tmp_path):
    write(loops.Trace(tmp_path / "trace.arrow"))
    return tmp_path / "trace.arrow"


def test_a_trace_has_a_column_of_each_and_null_between(path):
    steps = loops.observe.read(path).steps
    assert [name for name in steps.column_names if "/" in name] == NAMES == gauges_of(train_step())
    for place, name in enumerate(NAMES):
        assert steps[name].to_pylist() == [None if step % 2 else value(step, place) for step in range(1, 13)]
    gauges = as_recorded(path).gauges
    np.testing.assert_array_equal(gauges.of("update_rms").values[1], [value(2, 2), value(2, 3)])
    assert gauges.of("update_rms").names == ("dense", "block/attention/query")


def test_a_trace_goes_on_only_with_the_same_ready_probes(path):
    state = {"end": path.stat().st_size, "last_skip": 0, "held": loops.record.trace.action.pack([])}
    for gauges in (GAUGES, {"update_rms": ["dense"]}):
        trace = loops.Trace(path)
        trace.load_state(state)
        trace.begin(types.SimpleNamespace(train_step=train_step(gauges)))
        if gauges is GAUGES:
            with trace:
                trace(visit(13, 14))
            assert loops.observe.read(path).steps["update_rms/dense"].to_pylist()[-1] == value(14, 2)
        else:
            with pytest.raises(loops.LoopError, match=r"ready probes are .*, but those of this run update_rms/dense\."):
                trace.__enter__()


def test_damage_in_the_column_is_found(path):
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with pytest.warns(loops.TraceWarning, match="read up to step 5"):
        assert len(loops.observe.read(path).steps) == 5


@pytest.mark.filterwarnings("ignore:TensorBoard is not installed")
def test_tensorboard_shows_a_curve_of_each_with_its_description(tmp_path):
    board = loops.TensorBoard(tmp_path / "whole", every=3)
    write(board)
    curves, said = events(tmp_path / "whole"), descriptions(tmp_path / "whole")
    assert curves["update_rms/dense"] == [(6, value(6, 2)), (12, value(12, 2))]
    assert "block/attention" in next(name for name in curves if name.startswith("attention_entropy"))
    # A parted run ends with the same averages as a whole one.
    parted, again = (loops.TensorBoard(tmp_path / "parts", every=3) for _ in range(2))
    write(parted, ends=(5,))
    again.load_state(parted.save_state())
    again.begin(types.SimpleNamespace(train_step=train_step(), actions=[]))
    with again:
        again(visit(6, 12))
    assert events(tmp_path / "parts")["noise_scale"] == curves["noise_scale"]
    assert {name for name in said if not said[name]} == set()
    again.load_no_state(7)


def test_the_noise_scale_is_a_ratio_of_averages():
    noise, signal = np.array([4.0, np.nan, 8.0, -20.0]), np.array([-1.0, np.nan, 2.0, 3.0])
    found = loops.observe.noise_scale(noise, signal)
    kept = 0.99
    assert np.isnan(found[:2]).all()
    assert found[2] == pytest.approx((kept * 4 + 8) / (kept * -1 + 2))
    assert found[3] == 0.0
    assert np.isnan(Averages().add(np.nan, np.nan))


def test_a_report_draws_a_figure_of_each(path, tmp_path):
    loops.observe.report([path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for heading in ("Attention logits", "Attention entropy, in nats", "Size of updates", "Gradient noise scale"):
        assert f"<h3>{heading}" in page
    assert "block/attention/query" in page


def test_a_replay_says_that_it_needs_every_step():
    critical = [np.nan, 2.0]
    columns = {"loss_scale": [1.0, 1.0], "applied": [1.0, 1.0], "critical_low": critical, "critical_high": critical}
    run = as_recorded({name: np.array(values) for name, values in columns.items()})
    with pytest.raises(loops.LoopError, match=r"run: 1 of its 2 steps were not measured, as with watch\(every=10\)"):
        loops.replay.recording.recording_of(run, "run")


def test_every_output_of_a_ready_probe_has_a_description():
    from loops.record.tensorboard import metadata

    outputs = [output for outputs in observe.GAUGES.values() for output in outputs]
    assert all(metadata(f"{output}/dense").summary_description for output in outputs)


def test_histograms_that_are_held_to_the_end_are_written_with_ready_probes_too(tmp_path):
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    watch = observe.watch(model, kinds=["weight_gradients", "update_rms"])
    step = loops.TrainStep(model, squared_error, keras.optimizers.SGD(0.1), probes=watch)
    data = tf.data.Dataset.from_tensors((tf.ones([2, 4]), tf.ones([2, 3]))).repeat()
    loops.Loop(step, data, actions=[loops.Trace(tmp_path / "trace.arrow")]).run(7)
    recorded = loops.observe.read(tmp_path / "trace.arrow")
    assert recorded.steps.num_rows == 7
    assert 7 in recorded.histograms["step"].to_pylist()
