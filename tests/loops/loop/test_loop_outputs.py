"""Guards what may be a train step and what it may return: any callable, and a dict of scalars."""

import numpy as np
import pytest
import tensorflow as tf
from loop_cases import Recorder, numbers

import loops


def run(step, steps_per_call, steps=5, **arguments):
    """Runs over the numbers 0.0, 1.0, ..., and returns the loop and all outputs."""
    seen = Recorder()
    data = numbers().map(lambda number: number - 1)
    loop = loops.Loop(step, data, steps_per_call=steps_per_call, actions=[seen], **arguments)
    loop.run(steps)
    return loop, {name: seen.column(name) for name in seen.visits[0].outputs}


def test_scalars_of_every_dtype_pass():
    def step(number):
        python = {"float32": 0.5, "int32": 3, "bool": True, "float64": np.float64(2.5)}
        return python | {kind: tf.cast(number, kind) for kind in ("int64", "float16", "bfloat16")}

    outputs = run(step, 3)[1]
    assert len(outputs) == 7
    for dtype, value in outputs.items():
        assert (value.dtype.name, value.shape) == (dtype, (5,))


@pytest.mark.parametrize(
    ("steps_per_call", "outputs", "named"),
    [
        (1, lambda n: n, "expected a dict of scalar tensors"),
        (3, lambda n: None, "expected a dict of scalar tensors"),
        (1, lambda n: (n, n), "expected a dict of scalar tensors"),
        (3, lambda n: {}, "expected a dict of scalar tensors"),
        (1, lambda n: {"loss": tf.stack([n, n])}, r"'loss' with shape \(2,\).*tf.reduce_mean"),
        (3, lambda n: {"loss": tf.zeros([1])}, r"'loss' with shape \(1,\)"),
        (1, lambda n: {"loss": tf.zeros([tf.cast(n, tf.int32)])}, "'loss' with shape"),
        (1, lambda n: {"loss": n, "text": tf.strings.as_string(n)}, "text"),
        (3, lambda n: {"loss": n, "text": tf.strings.as_string(n)}, "text"),
        (3, lambda n: {3: n}, "3"),
        (1, lambda n: {"loss": n, "nothing": None}, "nothing"),
        (3, lambda n: {"inner": {"loss": n}}, "inner"),
        (1, lambda n: {"loss": n, "applied": tf.reshape(n > 2, [1])}, r"applied.*\(1,\).*scalar bool"),
        (3, lambda n: {"loss": n, "attempted": tf.reshape(n > 2, [1])}, r"attempted.*\(1,\).*scalar bool"),
        (1, lambda n: {"loss": n, "value": tf.zeros([tf.cast(n, tf.int32) + 1])}, r"\(None,\).*tf.ensure_shape"),
        (3, lambda n: {"loss": n, "value": tf.strings.as_string(n)[None]}, "'value' with shape .* string"),
        (1, lambda n: {"loss": n, "value": tf.cast(n, tf.complex64)[None]}, "'value' with shape .* complex"),
        (1, lambda n: {"counts": n[None]}, "no scalar: expected at least one"),
    ],
)
def test_other_outputs_are_named(steps_per_call, outputs, named):
    with pytest.raises(loops.BadOutputs, match=named):
        run(outputs, steps_per_call)


@pytest.mark.parametrize(
    ("steps_per_call", "extra", "expected"),
    [
        (3, {}, (7, 7, 7)),
        (1, {"attempted": lambda n: n < 4}, (7, 4, 4)),
        (1, {"applied": lambda n: n < 4}, (7, 7, 4)),
        (3, {"attempted": lambda n: n % 3 == 2, "applied": lambda n: (n % 3 == 2) & (n < 5)}, (7, 2, 1)),
        (3, {"applied": lambda n: n}, (7, 7, 6)),
    ],
    ids=["neither", "attempted", "applied", "both", "a number"],
)
def test_what_a_step_says_was_attempted_and_applied_is_counted(steps_per_call, extra, expected):
    loop, _ = run(lambda n: {"loss": n, **{name: of(n) for name, of in extra.items()}}, steps_per_call, 7)
    assert loop.counters == loops.Counters(*expected)
    assert loop.counters.skipped == expected[1] - expected[2]


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_a_step_that_makes_its_variables_at_the_first_call(steps_per_call):
    made = []

    def step(number):
        if not made:
            made.append(tf.Variable(0.0))
        return {"loss": made[0].assign_add(number)}

    np.testing.assert_array_equal(run(step, steps_per_call)[1]["loss"], [0, 1, 3, 6, 10])
