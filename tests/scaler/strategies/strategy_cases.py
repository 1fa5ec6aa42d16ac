"""Many words through one compiled loop: the states of a strategy after each step, in each way a step may be run.

The numbers of a strategy are tensors with one value a word, so that nothing is traced again for other numbers.
"""

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from scaler import Event

WORDS, STEPS = 16, 32
HOWS = ("eager", "loop", "xla")
EXAMPLES = {"eager": 1, "loop": 3, "xla": 2}
"""Every example has many words of many steps; by hand they take longer."""


class Runner:
    """Runs words of events through the strategies that `make(**numbers)` gives.

    Each function is traced once: that is part of what is tested.
    """

    def __init__(self, make):
        self._make = make
        self._runs = {"eager": self._by_hand, "loop": tf.function(self._loop)}
        # XLA compiles what was traced.
        self._runs["xla"] = tf.function(self._runs["loop"], jit_compile=True, autograph=False)

    def __call__(self, how, finite, statistic, numbers):
        """The fields of the state after each step, [steps, ..., words]."""
        numbers = {name: tf.constant(value) for name, value in numbers.items()}
        states = self._runs[how](tf.constant(finite), tf.constant(statistic), numbers)
        return {field: value.numpy() for field, value in states._asdict().items()}

    def _start(self, numbers):
        state, words = self._make(**numbers).init(), WORDS

        def of_each_word(value):
            value = tf.convert_to_tensor(value)
            return value if value.shape[-1:] == [words] else tf.tile(value[..., None], [1] * value.shape.rank + [words])

        return type(state)(*map(of_each_word, state))

    def _one(self, state, finite, statistic, numbers):
        kind = "histogram" if statistic.dtype == tf.int64 else "amax"
        return self._make(**numbers).update(state, Event(finite, **{kind: statistic}))

    def _by_hand(self, finite, statistic, numbers):
        state, states = self._start(numbers), []
        for now, seen in zip(finite, statistic, strict=True):
            state = self._one(state, now, seen, numbers)
            states.append(state)
        return type(state)(*(tf.stack(values) for values in zip(*states, strict=True)))

    def _loop(self, finite, statistic, numbers):
        state = self._start(numbers)
        kind, steps = type(state), tf.shape(finite)[0]
        traces = [tf.TensorArray(value.dtype, steps, element_shape=value.shape) for value in state]
        for i in tf.range(steps):
            state = self._one(state, finite[i], statistic[i], numbers)
            traces = [trace.write(i, value) for trace, value in zip(traces, state, strict=True)]
        return kind(*(trace.stack() for trace in traces))


def assert_equal_traces(got, reference, finite, statistic, numbers):
    """Compares what a Runner gave with `reference(events, **numbers)`, word by word and bit by bit."""
    for word in range(WORDS):
        seen = statistic[..., word].tolist()
        events = list(zip(finite[:, word].tolist(), seen, strict=True))
        own = {name: value[word].item() for name, value in numbers.items()}
        want = reference(events, **own)
        for field, values in got.items():
            expected = np.array([state[field] for state in want], values.dtype)
            np.testing.assert_array_equal(values[..., word], expected, err_msg=f"{field}: {own}, {events}")


def random_flags(rng, words=WORDS):
    """Words from nearly all non-finite to all finite."""
    return rng.random((STEPS, words)) < np.linspace(0.05, 1.0, words)


def random_amax(rng, finite):
    """Walks of magnitudes, with jumps, zeros, subnormal numbers and infinities."""
    walk = rng.uniform(-40, 20, finite.shape[1]) + np.cumsum(rng.normal(0, 1.5, finite.shape), axis=0)
    walk = np.where(rng.random(finite.shape) < 0.25, np.round(walk), walk)  # Powers of two are the edges of octaves.
    amax = np.float32(2.0) ** np.clip(walk, -140, 127).astype(np.float32)
    special = rng.choice(np.float32([0, 2.0**-149, 2.0**-126, 3e38, np.inf]), finite.shape)
    amax = np.where(rng.random(finite.shape) < 0.1, special, amax)
    # A step may be non-finite by its norm alone.
    return np.where(finite | (rng.random(finite.shape) < 0.3), amax, np.float32(np.inf)).astype(np.float32)


def random_bounds(rng):
    """Ordered scales, powers of two in three words of four."""
    exponents = np.sort(rng.uniform(-126, 126, (3, WORDS)), axis=0)
    exponents = np.where(rng.random(WORDS) < 0.75, np.round(exponents), exponents)
    low, first, high = (np.clip(2.0**e, 2.0**-126, 2.0**126).astype(np.float32) for e in exponents)
    return {"min_scale": low, "initial_scale": first, "max_scale": high}


seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
