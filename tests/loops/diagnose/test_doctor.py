"""Guards `halfstep doctor --model`: what it takes, how it times, what it makes of its figures, and how it refuses."""

import dataclasses
import itertools
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from command_cases import run

import loops
import scaler
from loops.diagnose.doctor import diagnosis, timing
from loops.diagnose.doctor.diagnosis import Casts, Diagnosis, Padded, casts_of, padded, products_of, shares
from loops.diagnose.doctor.shown import advice, sized, text
from loops.diagnose.doctor.timing import (
    STEPS_A_CALL,
    Kind,
    PairedTiming,
    Pipeline,
    Running,
    Spread,
    Trial,
    batches_like,
    pipeline_of,
    program_of,
    time_interleaved,
    try_all,
)
from loops.diagnose.graph.census import Census, Row
from loops.diagnose.memory import Bytes, Footprint, saved_tensors


def small(policy="mixed_float16"):
    return keras.Sequential([keras.Input([16]), keras.layers.Dense(10, dtype=policy, name="only")], name="small")


def arrays(count=8):
    return np.ones([count, 16], np.float32), np.ones([count, 10], np.float32)


def data(count=8, size=4):
    return tf.data.Dataset.from_tensor_slices(arrays(count)).batch(size)


def squared(y, prediction):
    return tf.reduce_mean((tf.cast(prediction, tf.float32) - y) ** 2)


def as_tuple(**parts):
    whole = {"model": small(), "optimizer": keras.optimizers.SGD(0.1), "loss": squared, "sample": arrays(), **parts}
    return tuple(whole.values())


def nothing_to_train():
    return keras.Sequential([keras.Input([16]), keras.layers.Rescaling(2.0)], name="rescaled")


def loop(**settings):
    step = loops.TrainStep(small(), squared, keras.optimizers.SGD(0.1), **settings)
    return loops.Loop(step, data())


# What it takes.


def test_a_loop_is_made_anew_with_its_settings():
    built = loop(loss_scaler=scaler.LossScaler(scaler.Static(64.0)), accumulate=2, clip_norm=1.0, jit_compile=True)
    program = program_of(built, "--model x:y")
    step = program.step()
    assert step is not built.train_step
    assert (step.model, step.accumulate, step.clip_norm, step.jit_compile) == (program.model, 2, 1.0, True)
    assert step.loss_scaler.strategy == scaler.Static(64.0)
    assert step.loss_scaler is not built.train_step.loss_scaler
    assert isinstance(program.dataset, tf.data.Dataset)
    assert program.step(as_it_is=False).loss_scaler.strategy == scaler.Dynamic()


@pytest.mark.parametrize(
    ("optimizer", "strategy"),
    [
        (lambda: scaler.LossScaleOptimizer(keras.optimizers.Adam(0.5), scaler.Static(8.0)), scaler.Static(8.0)),
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.5), initial_scale=4.0),
            scaler.Dynamic(4.0),
        ),
        (lambda: keras.optimizers.Adam(0.5), None),
    ],
)
def test_an_optimizer_is_freed_of_its_scaler(optimizer, strategy):
    program = program_of(as_tuple(optimizer=optimizer()), "x")
    assert (type(program.optimizer), program.strategy) == (keras.optimizers.Adam, strategy)
    copied = program.step().optimizer
    assert copied is not program.optimizer
    assert float(copied.learning_rate) == 0.5


def test_a_dict_a_dataset_and_a_model_that_is_not_built_are_taken():
    parts = {"loss": squared, "sample": data(), "optimizer": keras.optimizers.SGD()}
    program = program_of({**parts, "model": keras.Sequential([keras.layers.Dense(10)])}, "x")
    assert program.model.built
    assert program.batch[0].shape == [4, 16]


REFUSED = {
    "nothing": (lambda: None, scaler.InvalidArgument),
    "a model alone": (lambda: small(), scaler.InvalidArgument),
    "three parts": (lambda: as_tuple()[:3], scaler.InvalidArgument),
    "model": (lambda: as_tuple(model="net"), scaler.InvalidArgument),
    "loss": (lambda: as_tuple(loss="mse"), scaler.InvalidArgument),
    "optimizer": (lambda: as_tuple(optimizer="adam"), scaler.InvalidArgument),
    "nothing to train": (lambda: as_tuple(model=nothing_to_train()), scaler.InvalidArgument),
    "no sample": (lambda: as_tuple(sample=None), scaler.InvalidArgument),
    "half a sample": (lambda: as_tuple(sample=arrays()[0]), scaler.InvalidArgument),
    "lists": (lambda: as_tuple(sample=([1.0], [2.0])), scaler.InvalidArgument),
    "an empty dataset": (lambda: as_tuple(sample=data().take(0)), loops.OutOfData),
    "a loop of a function": (lambda: loops.Loop(lambda batch: {"loss": 0.0}, data()), scaler.InvalidArgument),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_examined_is_refused_in_one_sentence(snapshot, name):
    built, error = REFUSED[name]
    with pytest.raises(error) as raised:
        program_of(built(), "--model train:build")
    assert re.sub(" at 0x[0-9a-f]+", "", str(raised.value)) == snapshot


def test_a_step_that_fails_is_told_in_one_line():
    def fails(y, prediction):
        raise RuntimeError("no such thing\nas this")

    with pytest.raises(loops.LoopError, match=r"^--model x: .*no such thing") as raised:
        diagnosis.diagnose_built(as_tuple(loss=fails), "--model x")
    assert "\n" not in str(raised.value)


# How it times.


def test_turns_change_who_is_first_and_ratios_are_within_a_round(monkeypatch):
    called = []
    clock = itertools.count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    found = time_interleaved(lambda: called.append("a"), lambda: called.append("b"), 0.0)
    assert "".join(called) == "abab" + "abba" * 4 + "ab"
    assert found.ratio == Spread(1.0, 1.0, 1.0)
    assert found.verdict == "the same"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.5, 0.9, "faster"), (0.9, 1.1, "the same"), (1.1, 1.3, "slower"), (0.8, 1.0, "the same")],
)
def test_a_difference_counts_where_the_quartiles_say_so(low, high, verdict):
    spread = Spread(1.0, 1.0, 1.0)
    assert PairedTiming(spread, spread, Spread((low + high) / 2, low, high)).verdict == verdict


def test_batches_begin_again_and_leave_out_others():
    first = next(iter(data(10, 4)))
    batches = batches_like(first, data(10, 4))
    assert [next(batches)[0].shape[0] for _ in range(5)] == [4] * 5


def test_a_dataset_that_is_read_once_is_refused():
    left = iter(range(1))

    def once():
        for _ in left:
            yield np.ones(16, np.float32), np.ones(10, np.float32)

    spec = tf.TensorSpec([16]), tf.TensorSpec([10])
    dataset = tf.data.Dataset.from_generator(once, output_signature=spec).batch(1)
    batches = batches_like(next(iter(dataset)), dataset)
    with pytest.raises(loops.OutOfData, match="can be read again from its beginning"):
        next(batches)


@pytest.mark.slow
def test_skips_are_those_of_the_pipelines_batches():
    x, y = arrays()
    spoilt = tf.data.Dataset.from_tensor_slices((np.stack([x, x * np.inf]), np.stack([y, y])))
    program = program_of(as_tuple(sample=spoilt), "x")
    found = pipeline_of(program, Running(program, program.step()), 0.01)
    assert (found.attempted, found.skipped) == (11, 5)


def test_what_cannot_be_tried_says_why_and_the_others_go_on(monkeypatch):
    def fail(*_, **__):
        raise tf.errors.UnimplementedError(None, None, "XLA knows no such operation\n\t [[node]]")

    monkeypatch.setattr(timing, "Running", fail)
    program = program_of(as_tuple(), "x")
    found = list(try_all(program, lambda batch=None: None, 0.0))
    assert [one.name for one in found] == [
        f"{STEPS_A_CALL} steps a call",
        "jit_compile=True",
        "float32",
        "mixed_bfloat16",
    ]
    assert {one.verdict for one in found} == {"not tried"}
    assert found[0].problem == "UnimplementedError: XLA knows no such operation"


def test_a_long_step_is_not_taken_hundreds_of_times(monkeypatch):
    """A step of a second for 20 steps a call would be seven minutes of waiting, to save microseconds."""
    monkeypatch.setattr(timing, "_LONG", 0.0)
    program = program_of(as_tuple(), "x")
    first = next(try_all(program, Running(program, program.step()), 0.0))
    assert first.verdict == "not tried"
    assert first.problem.startswith("a step takes 0.0 s")


def test_of_what_takes_long_rounds_are_three(monkeypatch):
    monkeypatch.setattr(timing, "_LONGEST", 0.0)
    calls = []
    time_interleaved(lambda: calls.append("before"), lambda: calls.append("after"), 0.0)
    assert calls.count("before") == calls.count("after") == 2 + 3


# What it finds in a graph.


@pytest.fixture(scope="module")
def graph():
    return saved_tensors(small(), squared, tuple(map(tf.constant, arrays())))[1]


def test_products_are_counted_with_those_of_the_backward_pass(graph):
    found = products_of(graph)
    assert [(one.op, one.layer, one.dtype, one.sides) for one in found] == [
        ("MatMul", "only", "float16", (8, 16, 10)),
        ("MatMul", "only", "float16", (16, 8, 10)),
    ]
    assert {one.multiplications for one in found} == {8 * 16 * 10}
    assert shares(found) == {"float16": 1.0}


def test_an_odd_side_is_tried_rounded_up(graph):
    found = padded(products_of(graph), 0.0)
    assert (found.layer, found.dtype, found.sides, found.rounded) == ("only", "float16", (8, 16, 10), (8, 16, 16))


def test_convolutions_multiply_by_their_filters():
    model = keras.Sequential([keras.Input([6, 6, 4]), keras.layers.Conv2D(8, 3, padding="same", dtype="float32")])
    model.add(keras.layers.Conv2D(2, 3, dtype="float32"))
    batch = tf.zeros([5, 6, 6, 4]), tf.zeros([5, 4, 4, 2])
    found = products_of(saved_tensors(model, squared, batch)[1])
    first, second = 5 * 36 * 8 * 9 * 4, 5 * 16 * 2 * 9 * 8
    counted = sorted((one.op, one.multiplications) for one in found)
    expected = {"Conv2D": [first, second], "Conv2DBackpropFilter": [first, second], "Conv2DBackpropInput": [second]}
    assert counted == sorted((op, size) for op, sizes in expected.items() for size in sizes)


def test_casts_are_summed():
    rows = [
        Row("a", "Cast", "float32 to float16", 2, 0, None, False, 0, 400),
        Row("a", "Cast", "float16 to float32", 1, 0, None, False, 0, 100),
        Row("a", "MatMul", "float16", 1, 0, "float16", False, 0, None),
    ]
    found = casts_of(Census(rows), 0.0)
    assert (found.count, found.bytes) == (3, 500)
    assert found.milliseconds.low >= 0
    assert casts_of(Census(rows[2:]), 0.0) is None
    large = dataclasses.replace(rows[0], cast_bytes=50_000_000)
    assert casts_of(Census([large]), 0.1).milliseconds.low > 0.1


# What it makes of its figures.


def spread(value, part=0.05):
    return Spread(value, value * (1 - part), value * (1 + part))


def turned(before, after):
    return PairedTiming(spread(before), spread(after), spread(after / before))


def made(**changes):
    whole = Bytes(weights=2_000_000, slots=4_000_000, gradients=2_000_000, activations=12_000_000)
    layers = {f"block/layer_{number}": Bytes(weights=9_000) for number in range(20)} | {"a" * 60: whole, None: Bytes()}
    half = Footprint("float16", {"a": Bytes(weights=1_000_000, masters=2_000_000, slots=4_000_000)})
    facts = Diagnosis(
        model="m",
        policy="mixed_float16",
        device="CPU",
        step=spread(10.0),
        pipeline=Pipeline(spread(5.0), turned(10.0, 15.0), 40, 0),
        products={"float16": 0.75, "float32": 0.25},
        different=[Row("norm", "Mul", "float32", 1, 0, "float16", True, 0, None)],
        casts=Casts(9, 3_000_000, spread(1.0)),
        padded=Padded("head", "float16", (64, 30, 10), (64, 32, 16), turned(1.0, 0.5)),
        trials=[
            Trial(Kind.JIT_COMPILE, turned(10.0, 4.0)),
            Trial(Kind.POLICY, turned(10.0, 9.0), policy="float32"),
            Trial(Kind.POLICY, turned(10.0, 10.0), policy="mixed_bfloat16"),
            Trial(Kind.RECOMPUTE, turned(10.0, 13.0)),
            Trial(Kind.STEPS_PER_CALL, None, "ValueError: it cannot be"),
        ],
        footprints=[Footprint("mixed_float16", layers, recomputed=2_000_000), half],
    )
    return dataclasses.replace(facts, **changes)


def test_advice_names_each_gain_the_largest_first(snapshot):
    assert advice(made()) == snapshot


def test_nothing_is_advised_that_is_within_the_noise():
    same = Trial(Kind.JIT_COMPILE, turned(10.0, 10.0))
    plain = Footprint("float32", {"a": Bytes(weights=100)})
    found = made(
        pipeline=Pipeline(spread(1.0), turned(10.0, 10.1), 40, 1),
        casts=None,
        padded=None,
        trials=[same],
        footprints=[plain],
    )
    assert advice(found) == []
    assert text(found).splitlines()[-1].startswith("Nothing that was tried")


def test_skips_are_advised_on_where_there_are_many():
    (said,) = [
        line for line in advice(made(pipeline=Pipeline(spread(5.0), turned(10.0, 10.1), 40, 10))) if "skips" in line
    ]
    assert "10 of 40 steps moved no weight" in said


@pytest.mark.parametrize(
    "changes", [{}, {"pipeline": None, "casts": None, "padded": None, "products": {}, "different": []}]
)
def test_the_text_fits_into_80_columns(changes):
    lines = text(made(**changes)).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "model 'm', mixed_float16, on CPU"
    assert any("not tried" in line for line in lines)
    assert "20 steps a call: ValueError: it cannot be" in lines


@pytest.mark.parametrize("width", [60, 50])
def test_a_narrow_terminal_loses_no_number(width):
    def numbers(lines):
        return set(re.findall(r"\d[\d.]*", lines))

    found = text(made(), width)
    assert numbers(text(made())) <= numbers(found)
    assert max(map(len, found.splitlines())) <= width


def test_sizes_are_written_with_three_digits():
    assert [sized(count) for count in (0, 999, 12_345, 1_234_567, 99_960_000_000)] == [
        *("0.00 kB", "1.00 kB", "12.3 kB", "1.23 MB"),
        "100 GB",
    ]


# The command.

PROGRAM = """
import keras, numpy as np, tensorflow as tf
def build():
    model = keras.Sequential([keras.Input([16]), keras.layers.Dense(10, dtype="mixed_float16")])
    data = tf.data.Dataset.from_tensor_slices((np.ones([8, 16], "float32"), np.ones([8, 10], "float32"))).batch(4)
    return model, keras.optimizers.Adam(), keras.losses.MeanSquaredError(), data
def nothing(): pass
def empty():
    model, optimizer, loss, data = build()
    return model, optimizer, loss, data.take(0)
def raising(): raise RuntimeError("not today")
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "doctored.py").write_text(PROGRAM)
    yield
    sys.modules.pop("doctored", None)


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("--model doctored:no", 2),
        ("--model doctored:nothing", 2),
        ("--model doctored:raising", 1),
        ("--model doctored:empty", 1),
        ("--model doctored:build --out no/such.png", 1),
        ("--out memory.png", 2),
    ],
)
def test_what_the_command_cannot_do_is_one_line_with_a_status(snapshot, capsys, tmp_path, arguments, status):
    found, printed, errors = run(capsys, "doctor", *arguments.split())
    assert (found, printed) == (status, "")
    assert errors.replace(str(tmp_path), "HERE") == snapshot
    assert errors.count("\n") == 1
