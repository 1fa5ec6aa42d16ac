"""Guards the trace of a run: every step once, histograms around skips, a resumed run's file as that of a whole one."""

import pathlib
import sys
import tempfile
import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_cases import batch
from models import plain_model, squared_error
from processes import kill_when

import loops
import scaler
from loops.record.trace.action import AFTER, Frame, frame_of, pack, unpack
from loops.record.trace.tensors import lacks_of, tensors_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_graphs")]

NAMES = ["activations/dense", "weight_gradients/dense/kernel"]


@pytest.fixture(scope="module")
def model():
    return keras.Sequential([keras.Input([2]), keras.layers.Dense(1, dtype="mixed_float16", name="dense")])


def step_of(model, names=NAMES):
    """What a trace asks of a train step."""
    return types.SimpleNamespace(probes=types.SimpleNamespace(names=names, model=model, dtypes={"dense": ("float16",)}))


def visit(first, last, skips=(), counting=lambda step: True):
    """The steps from first to last; the count of each is its number, so that it can be told."""
    steps = np.arange(first, last + 1)
    counts = np.zeros([len(steps), 2, 280], np.int64)
    counts[:, 0, 140] = counts[:, 1, 150] = [step if counting(step) else 0 for step in steps]
    outputs = {"loss": steps / 4, "applied": ~np.isin(steps, list(skips)), "loss_scale": np.full(len(steps), 2.0**10)}
    vectors = {"counts": counts, "amax": np.stack([steps, steps], axis=1).astype(np.float32)}
    return loops.Visit(loops.Counters(last, last, last), outputs, 0.0, last, vectors)


def write(path, model, ends, skips=(), **arguments):
    """A trace of visits that end with these steps; whatever `path` holds is replaced."""
    trace = loops.Trace(path, **arguments)
    trace.begin(types.SimpleNamespace(train_step=step_of(model)))
    with trace:
        for before, last in zip([0, *ends[:-1]], ends, strict=True):
            trace(visit(before + 1, last, skips))
        trace.end()
    return loops.observe.read(path)


def test_every_step_is_a_row(tmp_path, model, snapshot):
    found = write(tmp_path / "made" / "trace.arrow", model, [3, 4, 9], skips=[2])
    rows = found.steps.to_pylist()
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert [row["applied"] for row in rows] == [step != 2 for step in range(1, 10)]
    assert rows[4] == snapshot


ends = st.lists(st.integers(1, 7), min_size=1, max_size=6).map(lambda sizes: np.cumsum(sizes).tolist())


@settings(max_examples=60)
@given(ends, st.sets(st.integers(1, 42)), st.integers(1, 9), st.integers(0, 6))
def test_histograms_are_those_of_the_cadence_around_skips_and_the_last(model, ends, skips, every, window):
    with tempfile.TemporaryDirectory() as folder:
        found = write(pathlib.Path(folder) / "trace", model, ends, skips, every=every, window=window).histograms
    written = expected(ends[-1], skips, every, window)
    assert found["step"].to_pylist() == [step for step in written for _ in NAMES]
    assert found["count"].to_pylist() == found["step"].to_pylist()
    assert found["bin"].to_pylist() == [140, 150] * len(written)


def expected(last, skips, every, window):
    """The steps whose histograms are to be there."""
    around = {step for skip in skips if skip <= last for step in range(skip - window, skip + AFTER + 1)}
    kept = set(range(last - window + 1, last + 1)) | around if window else set()
    return [step for step in range(1, last + 1) if step % every == 0 or step in kept]


def test_frames_come_back_from_a_checkpoint_as_they_were():
    counts = np.zeros([3, 280], np.int64)
    counts[[0, 2, 2], [0, 279, 7]] = 2**40, 5, 1
    frames = [frame_of(7, counts), frame_of(9, counts * 2)]
    for got, frame in zip(unpack(pack(frames)), frames, strict=True):
        assert got.step == frame.step
        for name in Frame._fields[1:]:
            np.testing.assert_array_equal(getattr(got, name), getattr(frame, name))
    assert unpack(pack([])) == []


def test_a_step_at_which_nothing_was_counted_has_no_histograms(tmp_path, model):
    trace = loops.Trace(tmp_path / "trace.arrow", every=3, window=2)
    trace.begin(types.SimpleNamespace(train_step=step_of(model)))
    with trace:
        trace(visit(1, 9, counting=lambda step: step % 2 == 0))
        trace.end()
    found = loops.observe.read(tmp_path / "trace.arrow")
    assert sorted(set(found.histograms["step"].to_pylist())) == [6, 8]
    assert found.steps["amax/activations/dense"].to_pylist() == list(range(1, 10))


def test_a_further_run_goes_on_and_a_new_one_replaces(tmp_path, model):
    path = tmp_path / "trace.arrow"
    trace = loops.Trace(path, every=100, window=2)
    trace.begin(types.SimpleNamespace(train_step=step_of(model)))
    for first in (1, 4):
        with trace:
            trace(visit(first, first + 2))
            trace.end()
    found = loops.observe.read(path)
    assert found.steps["step"].to_pylist() == [1, 2, 3, 4, 5, 6]
    # The end of a run is one of the moments at which the flight recorder writes.
    assert found.histograms["step"].to_pylist()[::2] == [2, 3, 5, 6]
    assert write(path, model, [2]).steps["step"].to_pylist() == [1, 2]


@pytest.mark.parametrize("skips", [(), (6,), (8,), (3, 13)])
@pytest.mark.parametrize("after_the_end", [False, True])
def test_a_resumed_run_writes_what_a_whole_one_does(tmp_path, model, skips, after_the_end):
    """The first one went on after its checkpoint, or ended with it; both wrote more than the checkpoint knows."""
    arguments = {"every": 4, "window": 3}
    write(tmp_path / "whole", model, [3, 7, 9, 14], skips, **arguments)
    path = tmp_path / "stopped"
    trace = loops.Trace(path, **arguments)
    trace.begin(types.SimpleNamespace(train_step=step_of(model)))
    with trace:
        trace(visit(1, 3, skips))
        trace(visit(4, 7, skips))
        if after_the_end:
            trace.end()
        state = trace.save_state()
        if not after_the_end:
            trace(visit(8, 8, skips))
            trace.end()
    # As a kill leaves it, in the middle of what no checkpoint knows.
    path.write_bytes(path.read_bytes()[: max(state["end"], path.stat().st_size - 3)])
    resumed = loops.Trace(path, **arguments)
    resumed.load_state(state)
    resumed.begin(types.SimpleNamespace(train_step=step_of(model)))
    with resumed:
        resumed(visit(8, 9, skips))
        resumed(visit(10, 14, skips))
        resumed.end()
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize(
    ("layer", "names", "said"),
    [
        ("dense", NAMES[:1], "trace of activations/dense, weight_gradients/dense/kernel, but"),
        # As in a notebook whose cell is run again: Keras goes on counting.
        (
            "dense_1",
            [one.replace("dense", "dense_1") for one in NAMES],
            r"the numbers .* keras\.utils\.clear_session\(\)",
        ),
    ],
)
def test_other_tensors_are_refused_in_the_same_file(tmp_path, model, layer, names, said):
    path = tmp_path / "trace.arrow"
    trace = loops.Trace(path)
    trace.begin(types.SimpleNamespace(train_step=step_of(model)))
    with trace:
        trace(visit(1, 3))
    step = step_of(
        keras.Sequential([keras.Input([2]), keras.layers.Dense(1, dtype="mixed_float16", name=layer)]), names
    )
    step.probes.dtypes = {layer: ("float16",)}
    other = loops.Trace(path)
    other.load_state(trace.save_state())
    other.begin(types.SimpleNamespace(train_step=step))
    with pytest.raises(loops.LoopError, match=said), other:
        pytest.fail("no step may be taken")


def test_rows_without_names_are_said_to_be_left_out(tmp_path):
    trace = loops.Trace(tmp_path / "trace.arrow")
    trace.begin(types.SimpleNamespace(train_step=lambda batch: {}))
    with trace:
        with pytest.warns(loops.TraceWarning, match="no `probes` to name their rows"):
            trace(visit(1, 3))
        trace(visit(4, 5))
    assert loops.observe.read(tmp_path / "trace.arrow").tensors.num_rows == 0


def test_a_probe_has_the_dtype_that_was_seen(model):
    step = step_of(model, ["activations/scores", "activation_gradients/scores", "activation_gradients/both"])
    step.probes.dtypes = {"scores": ("float32",), "both": ("float32", "float16")}
    assert [(tensor.format, tensor.certain) for tensor in tensors_of(step)] == [
        ("float32", True),
        ("float32", True),
        ("float16", False),
    ]


def test_a_trace_is_written_only_inside_of_a_run(tmp_path):
    with pytest.raises(RuntimeError, match="with statement"):
        loops.Trace(tmp_path / "trace.arrow")(None)
    assert not list(tmp_path.iterdir())
    assert loops.Trace.chief_only


@pytest.mark.parametrize("arguments", [{"every": 0}, {"every": "2"}, {"window": -1}, {"window": 2.0}, {"path": 3}])
def test_arguments_that_cannot_work(arguments):
    with pytest.raises(scaler.InvalidArgument, match="expected"):
        loops.Trace(**{"path": "trace.arrow", **arguments})


def test_without_pyarrow_one_sentence_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.ipc", raising=False)
    for call in (loops.Trace, loops.observe.read):
        with pytest.raises(loops.LoopError, match=r'pip install "halfstep\[trace\]"'):
            call(tmp_path / "trace.arrow")


def test_formats_are_those_that_layers_compute_in():
    layers = [
        keras.layers.Dense(2, dtype="mixed_bfloat16", name="first"),
        keras.layers.Dense(2, dtype="float32", name="last"),
    ]
    inner = keras.Sequential(
        [keras.Input([2]), keras.layers.Dense(2, dtype="mixed_float16", name="dense")], name="inner"
    )
    model = keras.Sequential([keras.Input([2]), inner, *layers])
    expected = {
        "activations/inner/dense": ("float16", False),
        "activation_gradients/first": ("bfloat16", True),
        "weight_gradients/inner/dense/kernel": ("float16", True),
        "weights/last/bias": ("float32", False),
        "updates/inner/dense/kernel": ("float32", False),
        "slots/adam/first_kernel_momentum": ("float32", False),
        "activations/by hand": ("float16", False),
    }
    found = tensors_of(step_of(model, list(expected)))
    assert {tensor.name: (tensor.format, tensor.carries_scale) for tensor in found} == expected
    assert tensors_of(types.SimpleNamespace(probes=None)) == tensors_of(lambda batch: {}) == []


def numbers():
    return tf.data.Dataset.range(1, 1000).map(lambda number: tf.cast(number, tf.float32))


def test_a_step_without_probes_has_rows_of_what_it_returns(tmp_path):
    loop = loops.Loop(
        lambda number: {"loss": tf.cast(number, tf.bfloat16), "other": number, "applied": number != 2.0},
        numbers(),
        steps_per_call=2,
        actions=[loops.Trace(tmp_path / "trace.arrow")],
    )
    loop.run(3)
    found = loops.observe.read(tmp_path / "trace.arrow")
    assert found.steps.select(["step", "loss", "applied", "critical_low"]).to_pylist() == [
        {"step": step, "loss": step, "applied": step != 2, "critical_low": None} for step in (1, 2, 3)
    ]
    assert (found.histograms.num_rows, found.tensors.num_rows) == (0, 0)


def real_run(folder, steps):
    """Probes on a float16 model, whose scale comes down from far too high, on one batch: weights do not move before."""
    # Keras would count the layers of this process in their names.
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1, dtype="float16")])
    step = loops.TrainStep(
        model,
        squared_error,
        keras.optimizers.SGD(0.01),
        loss_scaler=scaler.LossScaler(scaler.Dynamic(2.0**24)),
        probes=scaler.observe.watch(model),
    )
    data = tf.data.Dataset.from_tensors(batch()).repeat()
    actions = [
        loops.Trace(folder / "trace.arrow", every=7, window=2),
        loops.Checkpoint(folder / "checkpoints", every=3, resume=True),
    ]
    loops.Loop(step, data, steps_per_call=3, actions=actions).run(steps)
    return step.probes.names


def test_a_real_run_and_its_critical_scale(tmp_path):
    """Up to the first applied step nothing but the scale changes, so each step knows what the others saw."""
    names = real_run(tmp_path / "whole", 16)
    found = loops.observe.read(tmp_path / "whole" / "trace.arrow")
    rows = found.steps.to_pylist()
    assert [row["step"] for row in rows] == list(range(1, 17))
    assert [name for name in rows[0] if name.startswith("amax/")] == [f"amax/{name}" for name in names]
    first = next(row for row in rows if row["applied"])
    assert 2 <= first["step"] <= 14
    assert first["critical_low"] == first["critical_high"] == first["loss_scale"]
    for row in rows[: first["step"] - 1]:
        assert row["cause"] == "OVERFLOW"
        assert row["critical_low"] == 0
        assert first["critical_high"] <= row["critical_high"] == row["loss_scale"] / 2
    assert set(found.histograms["tensor"].to_pylist()) == set(names)


def write_for_ever(folder):
    def step(number):
        return {"loss": number, "counts": tf.cast(tf.fill([2, 280], number), tf.int64), "amax": tf.fill([2], number)}

    layers = [keras.Input([2]), keras.layers.Dense(1, dtype="mixed_float16", name="dense")]
    step.probes = types.SimpleNamespace(names=NAMES, model=keras.Sequential(layers))
    data = tf.data.Dataset.range(1, 10**9).map(lambda number: tf.cast(number, tf.float32))
    loops.Loop(step, data, steps_per_call=50, actions=[loops.Trace(folder / "trace.arrow")]).run(10**9)


def test_a_kill_loses_no_visit_that_was_written(tmp_path):
    path = tmp_path / "trace.arrow"
    kill_when(lambda: path.exists() and path.stat().st_size >= 300_000, write_for_ever, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", loops.TraceWarning)  # where the kill fell into the middle of a visit
        steps = loops.observe.read(path).steps["step"].to_pylist()
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) % 50 == 0
    assert len(steps) > 500


def embedded():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(5, 4, name="words", dtype="mixed_float16"), keras.layers.Flatten()]
    return keras.Sequential([keras.Input([6], dtype="int32"), *layers, keras.layers.Dense(1, dtype="float32")])


def test_the_values_of_an_index_are_summed():
    model, ids, target = embedded(), tf.constant([[1, 1, 1, 1, 2, 2]] * 8), tf.ones([8, 1])
    with tf.GradientTape() as tape:
        loss = squared_error(target, model(ids))
    dense = tf.convert_to_tensor(tape.gradient(loss, model.trainable_variables)[0])
    step = loops.TrainStep(
        model,
        squared_error,
        keras.optimizers.SGD(0.0),
        loss_scaler=scaler.LossScaler(scaler.Static(2.0**8)),
        probes=scaler.observe.watch(model),
    )
    outputs = tf.function(step)((ids, target))
    name = "weight_gradients/words/embeddings"
    row = step.probes.names.index(name)
    assert outputs["amax"][row].numpy() / 2.0**8 == pytest.approx(np.abs(dense).max(), rel=1e-2)
    # The counts are those of the values as they come.
    assert outputs["counts"].numpy()[row].sum() == 8 * 6 * 4
    (tensor,) = [one for one in tensors_of(step) if one.name == name]
    assert (tensor.format, tensor.certain) == ("float32", True)
    alone = loops.TrainStep(
        model, squared_error, keras.optimizers.SGD(0.0), probes=scaler.observe.watch(model, kinds=["weight_gradients"])
    )
    tf.function(alone)((ids, target))
    (tensor, *_) = [one for one in tensors_of(alone) if one.name == name]
    assert (tensor.format, tensor.certain) == ("float16", False)


def test_what_the_largest_gradient_is_not_in():
    def step(model, watched=None, **arguments):
        probes = scaler.observe.watch(model) if watched is None else scaler.observe.watch(model, **watched)
        return loops.TrainStep(model, squared_error, keras.optimizers.SGD(0.0), probes=probes, **arguments)

    model = plain_model()
    assert lacks_of(step(model), 1) == []
    assert lacks_of(step(model), 2) == ["replicas"]
    assert lacks_of(step(model, accumulate=2), 1) == ["micro-batches"]
    assert lacks_of(step(model, {"kinds": ["activations"]}), 1) == ["weights"]
    assert lacks_of(step(model, {"layers": [model.layers[0].name]}), 1) == ["weights"]
