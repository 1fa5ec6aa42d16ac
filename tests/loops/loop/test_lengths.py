"""Guards that a source of batches of many lengths costs a few traces, and what a run of it computes and resumes."""

import io

import keras
import numpy as np
import pytest
import rich.console
import tensorflow as tf

import loops
import scaler

TRACES = []


class Lengths:
    """Batches whose length is another one at each step, with a position."""

    def __init__(self, count=40):
        self.at, self.count = 0, count

    def __iter__(self):
        while self.at < self.count:
            rng = np.random.default_rng(self.at)
            self.at += 1
            x = rng.normal(size=[2, int(rng.integers(3, 30)), 3]).astype(np.float32)
            yield x, x.sum(-1, keepdims=True)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def loss(y, prediction):
    TRACES.append(prediction.shape)
    return tf.reduce_mean(tf.square(y - tf.cast(prediction, tf.float32)))


def made(source, steps_per_call=5, policy="float32", loss=loss, **options):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Conv1D(4, 3, padding="same", dtype=policy), keras.layers.Dense(1, dtype="float32")]
    model = keras.Sequential([keras.Input([None, 3]), *layers])
    step = loops.TrainStep(model, loss, keras.optimizers.SGD(0.05), loss_scaler=scaler.LossScaler())
    TRACES.clear()
    return loops.Loop(step, source, steps_per_call=steps_per_call, **options)


def weights(loop):
    return [one.numpy() for one in loop.train_step.model.trainable_variables]


@pytest.fixture(scope="module")
def each_by_itself():
    """The weights after twelve steps by hand, each in a graph of its own length."""
    loop = made(Lengths())
    for x, y in Lengths(12):
        tf.function(loop.train_step)((tf.constant(x), tf.constant(y)))
    return weights(loop)


@pytest.mark.parametrize("steps_per_call", [1, 5])
def test_from_the_third_length_on_one_trace_serves_all(each_by_itself, steps_per_call):
    said = io.StringIO()
    progress = loops.Progress(console=rich.console.Console(file=said))
    loop = made(Lengths(), steps_per_call=steps_per_call, actions=[progress])
    loop.run(12)
    assert len({tuple(shape) for shape in TRACES if shape.is_fully_defined()}) == 2
    assert {tuple(shape) for shape in TRACES if not shape.is_fully_defined()} == {(2, None, 1)}
    assert loop.counters.applied == 12
    for value, expected in zip(weights(loop), each_by_itself, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert said.getvalue().count("the step is traced for any length where they differ: (2, None, 3), (2, None, 1)") == 1


def test_two_lengths_stay_two_traces():
    def two():
        for length in (4, 7) * 5:
            yield np.ones([2, length, 3], np.float32), np.ones([2, length, 1], np.float32)

    loop = made(two())
    loop.run(10)
    assert {tuple(shape) for shape in TRACES} == {(2, 4, 1), (2, 7, 1)}


def test_another_side_that_differs_later_is_another_trace():
    def rows_later():
        for at in range(8):
            rows, length = (2 if at < 6 else at), at + 3
            yield np.ones([rows, length, 3], np.float32), np.ones([rows, length, 1], np.float32)

    loop = made(rows_later())
    loop.run(8)
    assert [tuple(one) for one in dict.fromkeys(tuple(shape) for shape in TRACES)][2:] == [
        (2, None, 1),
        (None, None, 1),
    ]


@pytest.mark.dear("a whole run and a stopped one, each traced for many lengths")
@pytest.mark.slow_with("7-mixed_float16")
@pytest.mark.parametrize(("stop", "policy"), [(2, "float32"), (7, "float32"), (7, "mixed_float16")])
def test_a_run_that_stops_and_goes_on_has_the_same_bits(tmp_path, stop, policy):
    def run(folder, goal):
        saves = loops.Checkpoint(tmp_path / folder, every=100, resume=True)
        loop = made(Lengths(), policy=policy, actions=[saves])
        loop.run(goal)
        return loop

    whole = run("whole", 10)
    run("stopped", stop)
    resumed = run("stopped", 10)
    for value, expected in zip(weights(resumed), weights(whole), strict=True):
        np.testing.assert_array_equal(value, expected)
    if stop == 7:
        # One for the state of the run, whose batch is the first, and one for all lengths.
        assert len({tuple(shape) for shape in TRACES}) == 2


@pytest.mark.dear("XLA compiles two steps, one of them for many lengths")
def test_a_step_that_xla_compiles_by_our_choice_is_compiled_no_more():
    def of_one_length_at_first():
        for at in range(8):
            length = 5 if at < 3 else at
            yield np.ones([2, length, 3], np.float32), np.ones([2, length, 1], np.float32)

    loop = made(of_one_length_at_first(), policy="mixed_float16", steps_per_call=1)
    loop.run(3)
    assert loop.calls.jit_compile
    loop.run(8)
    assert not loop.calls.jit_compile
    asked = made(of_one_length_at_first(), policy="mixed_float16", steps_per_call=1, jit_compile=True)
    asked.run(8)
    assert asked.calls.jit_compile


def test_a_step_that_needs_each_length_is_traced_for_each_and_says_so():
    def needs_length(y, prediction):
        return loss(y, prediction) / prediction.shape[1]

    loop = made(Lengths(), loss=needs_length)
    with pytest.warns(
        UserWarning, match="is traced for each of them.*cannot be traced for any length .*Pad the batches"
    ):
        loop.run(6)
    assert loop.counters.applied == 6
    assert {shape[1] for shape in TRACES if shape.is_fully_defined()} == {x.shape[1] for x, _ in Lengths(6)}
