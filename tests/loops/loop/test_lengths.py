"""Guards that a source of batches of many lengths costs a few traces, and what a run of it computes and resumes."""

import functools
import io

import keras
import numpy as np
import pytest
import rich.console
import tensorflow as tf

import loops

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


def sized(*sizes):
    """Batches of ones with these rows and lengths."""
    return ((np.ones([*size, 3], np.float32), np.ones([*size, 1], np.float32)) for size in sizes)


def loss(y, prediction):
    TRACES.append(tuple(prediction.shape))
    return tf.reduce_mean(tf.square(y - tf.cast(prediction, tf.float32)))


class Forward:
    """A step that trains nothing: where only its traces are asked for."""

    def __init__(self, policy="float32"):
        self.model = keras.Sequential([keras.Input([None, 3]), keras.layers.Dense(1, use_bias=False, dtype=policy)])

    def __call__(self, x, y):
        return {"loss": loss(y, self.model(x))}


def written(policy="float32"):
    """A step of one's own, and its weight."""
    keras.utils.set_random_seed(0)
    weight, forward = tf.Variable(0.5), Forward(policy)

    def step(x, y):
        return {"loss": weight.assign(0.9 * weight + forward(weight * x, y)["loss"])}

    return step, weight


def written_in_16_bits():
    """Which XLA compiles, until the lengths are many."""
    return written("mixed_float16")


def looping(step, source, steps_per_call=2, **options):
    TRACES.clear()
    return loops.Loop(step, source, steps_per_call=steps_per_call, **options)


@functools.cache
def whole(make):
    """What ten steps came to: the counters, the weight, the traces, and what was said."""
    said = io.StringIO()
    progress = loops.Progress(console=rich.console.Console(file=said))
    step, weight = make()
    counters = looping(step, Lengths(), actions=[progress]).run(10)
    return counters, weight.numpy(), set(TRACES), said.getvalue()


def test_from_the_third_length_on_one_trace_serves_all():
    counters, found, traces, said = whole(written)
    assert counters.applied == 10
    assert len(traces) == 3
    assert {shape for shape in traces if None in shape} == {(2, None, 1)}
    assert said.count("the step is traced for any length where they differ: (2, None, 3), (2, None, 1)") == 1
    step, weight = written()
    for x, y in Lengths(10):
        step(x, y)
    np.testing.assert_allclose(found, weight.numpy(), rtol=1e-6)


def test_two_lengths_stay_two_traces():
    looping(Forward(), sized(*[(2, 4), (2, 7)] * 3)).run(6)
    assert set(TRACES) == {(2, 4, 1), (2, 7, 1)}


def test_another_side_that_differs_later_is_another_trace():
    looping(Forward(), sized((2, 3), (2, 4), (2, 5), (2, 6), (6, 7), (7, 8))).run(6)
    assert list(dict.fromkeys(TRACES))[2:] == [(2, None, 1), (None, None, 1)]


@pytest.mark.slow_with("written_in_16_bits")
@pytest.mark.parametrize("make", [written, written_in_16_bits])
def test_a_run_that_stops_and_goes_on_has_the_same_bits(tmp_path, make):
    for goal in (7, 10):
        step, weight = make()
        looping(step, Lengths(), actions=[loops.Checkpoint(tmp_path, every=100, resume=True)]).run(goal)
    # One for the state of the run, whose batch is the first, and one for all lengths.
    assert len(set(TRACES)) == 2
    np.testing.assert_array_equal(weight.numpy(), whole(make)[1])


def test_a_step_that_xla_compiles_by_our_choice_is_compiled_no_more():
    lengths = [(2, 5), (2, 5), (2, 3), (2, 4)]
    loop = looping(Forward("mixed_float16"), sized(*lengths), steps_per_call=1)
    loop.run(2)
    assert loop.calls.jit_compile
    loop.run(4)
    assert not loop.calls.jit_compile
    asked = looping(Forward("mixed_float16"), sized(*lengths), steps_per_call=1, jit_compile=True)
    asked.run(4)
    assert asked.calls.jit_compile


def test_a_step_that_needs_each_length_is_traced_for_each_and_says_so():
    def needs_length(x, y):
        return {"loss": loss(y, x) / x.shape[1]}

    loop = looping(needs_length, Lengths())
    with pytest.warns(
        UserWarning, match="is traced for each of them.*cannot be traced for any length .*Pad the batches"
    ):
        loop.run(4)
    assert loop.counters.applied == 4
    assert {shape[1] for shape in TRACES if None not in shape} == {x.shape[1] for x, _ in Lengths(4)}
