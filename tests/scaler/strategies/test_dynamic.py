"""Guards Dynamic's trace: equal, step for step, to a second implementation, however the step is executed.

All words of a test run through one compiled loop: the parameters are tensors, so nothing is traced again.
"""

import functools
import itertools

import numpy as np
import pytest
import reference
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs import scales_of

from scaler import Dynamic, Event
from scaler.strategies import DynamicState

WORDS, STEPS = 8, 40
PARAMETERS = (
    "initial_scale",
    "growth_factor",
    "backoff_factor",
    "min_scale",
    "max_scale",
    "hysteresis",
    "consecutive_hysteresis",
)


def start(parameters):
    scale = tf.convert_to_tensor(parameters["initial_scale"])
    return DynamicState(scale, tf.zeros_like(parameters["hysteresis"]), tf.convert_to_tensor(parameters["hysteresis"]))


def one_step(state, finite, interval, parameters):
    return Dynamic(growth_interval=interval, **parameters).update(state, Event(finite))


def loop(words, intervals, parameters):
    state = start(parameters)
    traces = DynamicState(
        *(tf.TensorArray(value.dtype, tf.shape(words)[0], element_shape=value.shape) for value in state)
    )
    for i in tf.range(tf.shape(words)[0]):
        state = one_step(state, words[i], intervals[i], parameters)
        traces = DynamicState(*(trace.write(i, value) for trace, value in zip(traces, state, strict=True)))
    return DynamicState(*(trace.stack() for trace in traces))


def step_by_step(words, intervals, parameters):
    parameters = {name: tf.constant(value) for name, value in parameters.items()}
    state, states = start(parameters), []
    for finite, interval in zip(words, intervals, strict=True):
        state = one_step(state, tf.constant(finite), tf.constant(interval), parameters)
        states.append(state)
    return DynamicState(*(np.stack([value.numpy() for value in values]) for values in zip(*states, strict=True)))


RUNNERS = {
    "eager": step_by_step,
    "loop": tf.function(loop),
    "xla": tf.function(loop, jit_compile=True),
}


def assert_equal_traces(run, words, intervals, parameters):
    """Runs all words and compares with the reference."""
    count = words.shape[1]
    kinds = {"hysteresis": np.int32, "consecutive_hysteresis": bool}
    arrays = {name: reference.spread(parameters[name], count, kinds.get(name, np.float32)) for name in PARAMETERS}
    want = reference.dynamic(words, growth_interval=intervals, **arrays)
    got = run(words, np.broadcast_to(intervals, words.shape).astype(np.int32), arrays)
    for field, expected, actual in zip(DynamicState._fields, want, got, strict=True):
        np.testing.assert_array_equal(np.asarray(actual), expected, err_msg=field)
    return want


def powers(low, high):
    return st.integers(low, high).map(lambda exponent: 2.0**exponent)


def float32s(low, high, **options):
    return st.floats(float(np.float32(low)), float(np.float32(high)), width=32, **options)


@st.composite
def parameters(draw):
    """Valid numbers for one word, extremes among them."""
    bounds = st.one_of(powers(-126, 126), float32s(2.0**-126, 2.0**126), st.sampled_from([2.0**-126, 2.0**126, 1.0]))
    low, scale, high = sorted([draw(bounds), draw(bounds), draw(bounds)])
    growth = draw(st.one_of(powers(1, 126), float32s(1, 8, exclude_min=True)))
    backoff = draw(st.one_of(powers(-126, -1), float32s(2.0**-126, 1, exclude_max=True)))
    return scale, growth, backoff, low, high, draw(st.integers(1, 5)), draw(st.booleans())


@st.composite
def cases(draw):
    """Eight words of any length, padded with finite steps, each with parameters and an interval that may change."""
    letters = st.lists(st.booleans(), max_size=STEPS)
    words = [draw(letters) for _ in range(WORDS)]
    padded = np.array([word + [True] * (STEPS - len(word)) for word in words]).T
    columns = zip(*(draw(parameters()) for _ in range(WORDS)), strict=True)
    first, second = (np.array([draw(st.integers(1, 12)) for _ in range(WORDS)]) for _ in range(2))
    change = np.array([draw(st.integers(0, STEPS)) for _ in range(WORDS)])
    intervals = np.where(np.arange(STEPS)[:, None] < change, first, second)
    return padded, intervals, dict(zip(PARAMETERS, columns, strict=True))


SHARE = {"eager": 20, "loop": 5, "xla": 10}
"""Of the examples, one in so many; step by step they take longer."""


@pytest.mark.slow_with("xla")
@pytest.mark.parametrize("how", RUNNERS)
def test_equals_the_reference(how):
    @settings(max_examples=settings.default.max_examples // SHARE[how])
    @given(case=cases())
    def holds(case):
        assert_equal_traces(RUNNERS[how], *case)

    holds()


def test_every_word_of_ten_steps_with_every_small_interval_and_hysteresis():
    grid = itertools.product(itertools.product([False, True], repeat=10), (1, 2, 3, 4), (1, 2, 3), (False, True))
    words, intervals, hysteresis, consecutive = (np.array(column) for column in zip(*grid, strict=True))
    numbers = {"initial_scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "min_scale": 1.0, "max_scale": 32.0}
    numbers |= {"hysteresis": hysteresis, "consecutive_hysteresis": consecutive}
    want = assert_equal_traces(RUNNERS["loop"], words.T, intervals, numbers)
    assert want.loss_scale.min() == 1.0
    assert want.loss_scale.max() == 32.0


# Of other systems' own code, from 8 with a growth interval of 4; see the reference notes, section 1.21.
WORD = "1110111110110010011111111111"
RECORDED = {
    "torch": (WORD, {}, "8 8 8 4 4 4 4 8 8 4 4 4 2 1 1 .5 .25 .25 .25 .25 .5 .5 .5 .5 1 1 1 1"),
    "jmp": (WORD, {"min_scale": 1.0}, "8 8 8 4 4 4 4 8 8 4 4 4 2 1 1 1 1 1 1 1 2 2 2 2 4 4 4 4"),
    "Megatron": (WORD, {"hysteresis": 2}, "8 8 8 8 8 8 8 16 16 16 16 16 8 4 4 2 1 1 1 1 2 2 2 2 4 4 4 4"),
    "Megatron, cumulative": ("010", {"hysteresis": 2}, "8 8 4"),
    # A budget of two that a finite step refills: a single non-finite step never backs off.
    "consecutive": ("0101001", {"hysteresis": 2, "consecutive_hysteresis": True}, "8 8 8 8 8 4 4"),
}


@pytest.mark.parametrize("case", RECORDED)
def test_scales_are_those_recorded(case):
    word, options, scales = RECORDED[case]
    strategy, found = Dynamic(8.0, growth_interval=4, **options), []
    state = strategy.init()
    for letter in word:
        state = strategy.update(state, Event(tf.constant(letter == "1")))
        found.append(float(state.loss_scale))
    assert found == [float(scale) for scale in scales.split()]


@pytest.mark.parametrize("how", RUNNERS)
def test_numbers_given_as_python_values_act_as_tensors_do(how):
    strategy = Dynamic(8.0, growth_factor=3.0, backoff_factor=0.3, growth_interval=3, hysteresis=2, max_scale=1e3)
    word = reference.word("11101001110111111000001111")

    run = functools.partial(scales_of, strategy)
    if how != "eager":
        run = tf.function(run, jit_compile=how == "xla")
    got = run(tf.constant(word[:, 0]))
    want = reference.dynamic(
        word, initial_scale=8.0, growth_factor=3.0, backoff_factor=0.3, growth_interval=3, hysteresis=2, max_scale=1e3
    )
    np.testing.assert_array_equal(got.numpy(), want.loss_scale[:, 0])


def test_a_variable_changes_the_interval_of_a_compiled_step():
    interval = tf.Variable(100)
    strategy = Dynamic(8.0, growth_interval=interval)
    step = tf.function(lambda state: strategy.update(state, Event(tf.constant(True))))
    state = strategy.init()
    for _ in range(10):
        state = step(state)
    assert state.loss_scale.numpy() == 8.0
    interval.assign(3)
    state = step(state)
    assert (state.loss_scale.numpy(), state.good_steps.numpy()) == (16.0, 0)
    assert step.experimental_get_tracing_count() == 1
