"""Guards outputs of a train step that are no scalars: they reach the host by visit, each in a channel of its own."""

import numpy as np
import pytest
import tensorflow as tf

import loops

VALUES = {
    "counts": lambda n: tf.stack([tf.cast(n, tf.int64), 1, 2]),
    "matrix": lambda n: tf.fill([2, 3], n),
    "flags": lambda n: tf.stack([n > 2, n < 2]),
    "half": lambda n: tf.cast(n, tf.float16)[None],
    "nothing": lambda n: tf.zeros([0, 4]),
}


def visits(step, steps_per_call, steps=5, **arguments):
    seen = []
    data = tf.data.Dataset.range(100).map(lambda number: tf.cast(number, tf.float32))
    loops.Loop(step, data, steps_per_call=steps_per_call, actions=[seen.append], **arguments).run(steps)
    return seen


def everything(number):
    return {"loss": number, **{name: value(number) for name, value in VALUES.items()}}


@pytest.mark.slow_with("1-{'jit_compile': True}", "3-{'jit_compile': True}")
@pytest.mark.parametrize("arguments", [{}, {"jit_compile": True}], ids=str)
@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_vectors_are_stacked_by_step(steps_per_call, arguments):
    seen = visits(everything, steps_per_call, **arguments)
    assert [len(visit.outputs["loss"]) for visit in seen] == ([1] * 5 if steps_per_call == 1 else [3, 2])
    assert all(list(visit.outputs) == ["loss"] for visit in seen)
    assert [visit.first for visit in seen][:2] == [1, 1 + steps_per_call]
    for name, value in VALUES.items():
        found = np.concatenate([visit.vectors[name] for visit in seen])
        expected = np.stack([value(tf.constant(float(number))).numpy() for number in range(5)])
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected, err_msg=name)


def traces(step):
    """How often a loop inside the graph traces a step."""
    count = []

    def counting(number):
        count.append(number)
        return step(number)

    visits(counting, 3)
    return len(count)


def test_a_loop_inside_the_graph_traces_a_step_as_often_as_before():
    assert traces(everything) == traces(lambda number: {"loss": number})


@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (lambda n: tf.zeros([tf.cast(n, tf.int32) + 1]), r"'value' with shape \(None,\).*tf.ensure_shape"),
        (lambda n: tf.strings.as_string(n)[None], "'value' with shape .* string"),
        (lambda n: tf.complex(n, n)[None], "'value' with shape .* complex"),
    ],
)
def test_what_cannot_be_stacked_is_named(steps_per_call, value, sentence):
    with pytest.raises(loops.BadOutputs, match=sentence):
        visits(lambda number: {"loss": number, "value": value(number)}, steps_per_call)


def test_a_step_without_a_scalar_is_refused():
    with pytest.raises(loops.BadOutputs, match="no scalar: expected at least one"):
        visits(lambda number: {"counts": number[None]}, 1)


def test_writers_keep_writing_scalars_alone(tmp_path):
    rows = tmp_path / "steps.jsonl"
    data = tf.data.Dataset.range(9).map(lambda number: tf.cast(number, tf.float32))
    loops.Loop(everything, data, steps_per_call=2, actions=[loops.JsonLines(rows)]).run(4)
    lines = rows.read_text(encoding="utf-8").splitlines()
    assert '"loss"' in lines[-1]
    assert not any(name in line for name in VALUES for line in lines)
