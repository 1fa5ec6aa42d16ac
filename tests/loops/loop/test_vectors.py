"""Guards the outputs of a train step: they reach the host by visit as each step returned them, vectors apart."""

import json

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import loops
from loops.loop.results import pack, unpack

OUTPUTS = {
    "first": lambda n: tf.cast(n, tf.float32) / 4,
    "vector": lambda n: tf.cast(tf.stack([n, n + 1, n + 2]), tf.float32),
    "flag": lambda n: tf.equal(n % 2, 0),
    "flags": lambda n: tf.stack([n > 2, n < 2]),
    "wide": lambda n: n * 2**40,
    "small": lambda n: tf.cast(n, tf.int8),
    "second": lambda n: -tf.cast(n, tf.float32),
    "matrix": lambda n: tf.fill([2, 2], n),
    "half": lambda n: tf.cast(n, tf.float16)[None],
    "scalars of float32": lambda n: tf.cast(n, tf.float16),
    "array vector": lambda n: tf.cast(n, tf.float64),
    "none": lambda n: tf.zeros([0], tf.int64) + n,
}
SCALARS = ["first", "flag", "wide", "small", "second", "scalars of float32", "array vector"]


def everything(number):
    return {name: make(number) for name, make in OUTPUTS.items()}


def visits(step, steps_per_call, steps=7, data=None, actions=(), **arguments):
    seen = []
    data = tf.data.Dataset.range(9).repeat() if data is None else data
    loops.Loop(step, data, steps_per_call=steps_per_call, actions=[*actions, seen.append], **arguments).run(steps)
    return seen


@pytest.mark.slow_with("3-False-True")
@pytest.mark.parametrize(
    ("steps_per_call", "endless", "jit_compile"), [(1, False, False), (100, True, False), (3, False, True)]
)
def test_each_output_is_what_its_step_returned(tmp_path, steps_per_call, endless, jit_compile):
    data, rows = tf.data.Dataset.range(9).repeat(None if endless else 1), tmp_path / "steps.jsonl"
    writer = [loops.JsonLines(rows)]
    traces = []

    def step(number):
        traces.append(number)
        return everything(number)

    seen = visits(step, steps_per_call, data=data, actions=writer, jit_compile=jit_compile)
    assert len(traces) == 1
    assert [len(visit.outputs["first"]) for visit in seen] == {1: [1] * 7, 3: [3, 3, 1], 100: [7]}[steps_per_call]
    assert [visit.first for visit in seen] == list(range(1, 8, steps_per_call))
    expected = [everything(tf.constant(number, tf.int64)) for number in range(7)]
    for name in OUTPUTS:
        found = np.concatenate([(visit.outputs if name in SCALARS else visit.vectors)[name] for visit in seen])
        stacked = np.stack([one[name].numpy() for one in expected])
        assert found.dtype == stacked.dtype
        np.testing.assert_array_equal(found, stacked, err_msg=name)
    assert all(list(visit.outputs) == SCALARS for visit in seen)
    for line in rows.read_text(encoding="utf-8").splitlines():
        assert list(json.loads(line)) == ["step", *SCALARS]


def test_a_value_keeps_its_bits():
    patterns = np.array([0x7FC00001, 0xFF800000, 0x80000000, 0x00000001, 0x7F7FFFFF], np.uint32).view(np.float32)
    data = tf.data.Dataset.from_tensor_slices(patterns).repeat()
    (visit,) = visits(lambda x: {"x": x, "y": -x}, 5, steps=5, data=data)
    assert visit.outputs["x"].tobytes() == patterns.tobytes()
    assert visit.outputs["y"].tobytes() == (-patterns).tobytes()


def test_a_visit_may_keep_and_change_what_it_saw():
    def change(visit):
        visit.outputs["first"][:] = -1

    def step(number):
        return {"first": number, "second": -number}

    seen = [visit.outputs for visit in visits(step, 3, 6, actions=[change])]
    assert [list(outputs["second"]) for outputs in seen] == [[0, -1, -2], [-3, -4, -5]]
    assert all((outputs["first"] == -1).all() for outputs in seen)


DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]


@given(data=st.data(), dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=5))
def test_each_tensor_comes_back_bit_for_bit(data, dtypes):
    arrays, layout = [], []
    for name in dtypes:
        dtype = tf.as_dtype(name)
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        size = int(np.prod(shape)) * dtype.size
        raw = data.draw(st.binary(min_size=size, max_size=size))
        bits = np.frombuffer(raw, np.uint8) & 1 if name == "bool" else np.frombuffer(raw, np.uint8)
        arrays.append(bits.view(dtype.as_numpy_dtype).reshape(shape))
        layout.append((dtype, shape))
    found = unpack(pack([tf.constant(array) for array in arrays]).numpy(), layout)
    for array, one in zip(arrays, found, strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_function_returns_them_in_the_same_order(compiled):
    function = tf.function(lambda: pack([tf.constant([True, False]), tf.constant(2.5)]), jit_compile=compiled)
    flags, number = unpack(function().numpy(), [(tf.bool, [2]), (tf.float32, [])])
    assert flags.tolist() == [True, False]
    assert float(number) == 2.5
