"""Guards that outputs of many steps come apart again as each step returned them."""

import numpy as np
import pytest
import tensorflow as tf

import loops

OUTPUTS = {
    "first": lambda n: tf.cast(n, tf.float32) / 4,
    "vector": lambda n: tf.cast(tf.stack([n, n + 1, n + 2]), tf.float32),
    "flag": lambda n: tf.equal(n % 2, 0),
    "wide": lambda n: n * 2**40,
    "small": lambda n: tf.cast(n, tf.int8),
    "second": lambda n: -tf.cast(n, tf.float32),
    "matrix": lambda n: tf.fill([2, 2], n),
    "scalars of float32": lambda n: tf.cast(n, tf.float16),
    "array vector": lambda n: tf.cast(n, tf.float64),
    "none": lambda n: tf.zeros([0], tf.int64) + n,
}


def step(number):
    return {name: make(number) for name, make in OUTPUTS.items()}


def visits_of(data, steps_per_call, steps=7):
    visits = []
    loops.Loop(step, data, steps_per_call=steps_per_call, actions=[visits.append]).run(steps)
    return visits


@pytest.mark.exhaustive_with("3-True", "7-False", "7-True")
@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("steps_per_call", [1, 3, 7, 100])
def test_each_output_is_what_its_step_returned(endless, steps_per_call):
    data = tf.data.Dataset.range(9).repeat(None if endless else 1)
    visits = visits_of(data, steps_per_call)
    expected = [step(tf.constant(number, tf.int64)) for number in range(7)]
    for name in OUTPUTS:
        found = np.concatenate([visit.outputs.get(name, visit.vectors.get(name)) for visit in visits])
        stacked = np.stack([one[name].numpy() for one in expected])
        assert found.dtype == stacked.dtype
        np.testing.assert_array_equal(found, stacked)
    assert list(visits[0].outputs) == [name for name in OUTPUTS if expected[0][name].shape.rank == 0]


def test_a_value_keeps_its_bits():
    patterns = np.array([0x7FC00001, 0xFF800000, 0x80000000, 0x00000001, 0x7F7FFFFF], np.uint32).view(np.float32)
    data, visits = tf.data.Dataset.from_tensor_slices(patterns).repeat(), []
    loops.Loop(lambda x: {"x": x, "y": -x}, data, steps_per_call=5, actions=[visits.append]).run(5)
    assert visits[0].outputs["x"].tobytes() == patterns.tobytes()
    assert visits[0].outputs["y"].tobytes() == (-patterns).tobytes()


def test_a_visit_may_keep_and_change_what_it_saw():
    seen = []

    def act(visit):
        visit.outputs["first"][:] = -1
        seen.append((visit.outputs["first"], visit.outputs["second"]))

    loops.Loop(step, tf.data.Dataset.range(9).repeat(), steps_per_call=3, actions=[act]).run(6)
    assert [list(second) for _, second in seen] == [[0, -1, -2], [-3, -4, -5]]
    assert all((first == -1).all() for first, _ in seen)
