"""Checks for your own strategies: the promise, tested with random steps.

Needs Hypothesis, which is imported when a check is called.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from scaler.errors import ScalerError
from scaler.gate.loss_scaler import LossScaler
from scaler.strategies import base
from scaler.strategies.base import Event, Needs, Strategy

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

STEPS, WORDS, LONG = 24, 3, 400
"""Steps of a word, words that run side by side to see whether they disturb each other, steps of a run to a bound."""


class _Seen(NamedTuple):
    """One attempted step, as numbers: what an `Event` is made of."""

    finite: bool
    amax: float
    counts: tuple[int, ...]


def check_strategy(strategy: Strategy, *, examples: int = 20) -> None:
    """Drives a strategy through random steps and requires what the promise rests on.

    - A state: `init` and `update` give NamedTuples of one type, whose fields keep their dtypes and shapes, with a
      scalar float32 `loss_scale`.
    - Bounds: the scale is in [min_scale, max_scale], or in [2^-126, 2^126] without them, after any sequence of steps:
      400 non-finite or finite ones in a row, gradients of zero, subnormal, near the greatest float32.
    - Purity: the same state and event always give the same state, and no variables are made.
    - The same bits in eager mode, in a `tf.function`, in a `tf.range` loop and under XLA.
    - Elementwise: words that run side by side, along a last axis of the state, give what they give alone.
    - Save and restore: a `LossScaler` restored from a checkpoint goes on as if it had never stopped.

    Only the statistics that the strategy declares in `needs` are in the events.

    Args:
        strategy: The strategy, with the numbers it is to be checked with. A word has 24 steps: small intervals show
            more in it.
        examples: How many times three words of steps are drawn.

    Raises:
        InvalidArgument: For an object that is not a strategy.
        ScalerError: If Hypothesis is not installed.
        AssertionError: With a sentence that says which invariant broke, and after which events.
    """
    base.require_strategy(strategy, "check_strategy")
    needs = base.needs_of(strategy)
    try:
        import hypothesis
    except ImportError as error:
        raise ScalerError("check_strategy draws its steps with Hypothesis: pip install hypothesis") from error

    checks = _Checks(strategy, needs)
    checks.init()
    # The first event that breaks something ends the word, which is short enough: making it shorter would take minutes.
    settings = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    for finite in (False, True):
        checks.long_run(finite)

    @settings
    @hypothesis.given(hypothesis.strategies.lists(_words(needs), min_size=WORDS, max_size=WORDS))
    def keeps_the_promise(words: list[list[_Seen]]) -> None:
        checks.words(words)

    # A checkpoint is written for each of these.
    @hypothesis.settings(settings, max_examples=min(examples, 3))
    @hypothesis.given(_words(needs))
    def is_restored(word: list[_Seen]) -> None:
        checks.restored(word)

    keeps_the_promise()
    is_restored()


def _words(needs: Needs) -> SearchStrategy[list[_Seen]]:
    """Words of steps that may be drawn."""
    from hypothesis import strategies as st

    bins = len(needs.edges) + 1
    counts = st.lists(st.sampled_from([0, 1, 2, 100, 10**9]), min_size=bins, max_size=bins).map(tuple)
    powers = st.integers(-130, 127).map(lambda exponent: 2.0**exponent)
    largest = float(np.finfo(np.float32).max)
    amax = st.one_of(powers, st.floats(0, largest, width=32), st.sampled_from([0.0, 2.0**-149, largest]))
    good = st.builds(_Seen, st.just(True), amax, counts)
    bad = st.builds(_Seen, st.just(False), st.one_of(st.just(np.inf), amax), counts)
    # Long stretches of either kind are what reaches the bounds.
    streak = st.tuples(st.one_of(good, bad), st.integers(1, STEPS)).map(lambda pair: [pair[0]] * pair[1])
    one = st.one_of(good, bad).map(lambda seen: [seen])
    return st.lists(st.one_of(one, one, streak), min_size=1, max_size=STEPS).map(
        lambda parts: [*itertools.chain(*parts)][:STEPS]
    )


class _Watched(Event):
    """An event that remembers which missing statistics were asked for."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in ("amax", "histogram", "norm", "loss") and value is None:
            super().__getattribute__("__dict__").setdefault("missed", []).append(name)
        return value


class _Checks:
    """The invariants of one strategy, and the ways to run a word, each compiled once for a shape."""

    def __init__(self, strategy: Strategy, needs: Needs):
        self._strategy, self._needs = strategy, needs
        self._one = tf.function(lambda state, event: strategy.update(state, event))
        self._compiled: dict[tuple, Callable] = {}
        self._modes: dict[str, Callable] = {
            "in a graph": self._stepwise,
            "in a loop": lambda word: self._looped(_stacked(self._padded(word)), jit=False)[: len(word)],
            "under XLA": lambda word: self._looped(_stacked(self._padded(word)), jit=True)[: len(word)],
        }

    def init(self) -> None:
        """The first state."""
        with self._no_variables(()):
            first, second = self._strategy.init(), self._strategy.init()
        if not hasattr(first, "_asdict"):
            raise self._broken("a state", (), f"init() returned {first!r}, which is not a NamedTuple")
        for field, value in first._asdict().items():
            if not tf.is_tensor(value):
                shown = f"{field}={value!r} ({type(value).__name__})"
                what = f"init() returned {shown}, which is not a tensor: tf.constant({value!r})"
                raise self._broken("a state", (), what)
        if hasattr(first, "loss_scale") and first.loss_scale.dtype != tf.float32:
            raise self._broken("a state", (), f"loss_scale has dtype {first.loss_scale.dtype.name}, not float32")
        base.check_state(self._strategy, first)
        self._require_equal("purity", (), "init()", _values(second), "a first init()", _values(first))
        self._require_bounds((), float(first.loss_scale))

    def long_run(self, finite: bool) -> None:
        """Steps that all show the same, to a bound."""
        seen = _Seen(finite, 2.0**-24 if finite else np.inf, (1,) + (0,) * len(self._needs.edges))
        self._by_hand([seen] * 3)
        with self._named("the same values in eager mode and in a loop", [seen]):
            states = self._looped(_stacked([seen] * LONG), jit=False)
        for step, state in enumerate(states):
            self._require_bounds([seen] * (step + 1), float(state["loss_scale"]))

    def words(self, words: list[list[_Seen]]) -> None:
        """The first word in every mode, and all of them side by side."""
        word = words[0]
        eager = self._by_hand(word)
        for name, run in self._modes.items():
            invariant = f"the same values in eager mode and {name}"
            with self._named(invariant, word):
                found = run(word)
            for step, (states, expected) in enumerate(zip(found, eager, strict=True)):
                self._require_equal(invariant, word[: step + 1], name, states, "in eager mode", expected)
        with self._named("elementwise", word):
            each = zip(*(_stacked(self._padded(word)) for word in words), strict=True)
            together = self._looped(tuple(np.stack(parts, axis=-1) for parts in each), jit=False)
        alone = [self._modes["in a loop"](word) for word in words]
        for number, word in enumerate(words):
            for step in range(len(word)):
                own = {field: value[..., number] for field, value in together[step].items()}
                events = word[: step + 1]
                self._require_equal("elementwise", events, "beside others", own, "alone", alone[number][step])

    def restored(self, word: list[_Seen]) -> None:
        """A word that is stopped in its middle."""

        def shown(seen: _Seen) -> Event:
            # A guard of each gradient learns here how many there are.
            norms = tf.constant([seen.amax] * 2, tf.float32) if getattr(self._strategy, "by_tensor", None) else None
            return _event(seen, self._needs)._replace(norms=norms)

        middle = len(word) // 2
        whole = LossScaler(self._strategy)
        for seen in word[:middle]:
            whole.update(shown(seen))
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(loss_scaler=whole).write(f"{folder}/state")
            restored = LossScaler(self._strategy)
            tf.train.Checkpoint(loss_scaler=restored).read(path)
            # What is made at the first step is read from the file then.
            for step in range(middle, len(word)):
                for loss_scaler in (whole, restored):
                    loss_scaler.update(shown(word[step]))
                events, found, expected = word[: step + 1], _values(restored.state), _values(whole.state)
                self._require_equal("save and restore", events, "restored", found, "never stopped", expected)

    def _by_hand(self, word: Sequence[_Seen]) -> list[dict[str, np.ndarray]]:
        """The states of a word in eager mode, checked one by one."""
        strategy = self._strategy
        state, states = strategy.init(), []
        for step, seen in enumerate(word):
            events = word[: step + 1]
            event, before = _event(seen, self._needs), _values(state)
            with self._no_variables(events), self._named("an update in eager mode", events):
                with self._only_declared(events, _Watched(*event)) as watched:
                    after = strategy.update(state, watched)
                again = strategy.update(state, event)
            self._require_same_kind(events, state, after)
            self._require_equal("purity", events, "the same update again", _values(again), "once", _values(after))
            self._require_equal("purity", events, "the old state", _values(state), "before", before)
            self._require_bounds(events, float(after.loss_scale))
            state = after
            states.append(_values(state))
        return states

    def _stepwise(self, word: list[_Seen]) -> list[dict[str, np.ndarray]]:
        """The states of a word, one call of a function a step."""
        state, states = self._strategy.init(), []
        for seen in word:
            state = self._one(state, _event(seen, self._needs))
            states.append(_values(state))
        return states

    def _padded(self, word: list[_Seen]) -> list[_Seen]:
        """A word of STEPS steps."""
        return [*word, *[_Seen(True, 1.0, (1,) * (len(self._needs.edges) + 1))] * (STEPS - len(word))]

    def _looped(self, arrays: tuple, jit: bool) -> list[dict[str, np.ndarray]]:
        """The states of some steps, in one compiled loop."""
        tensors = [tf.constant(array) for array in arrays]
        key = (jit, *(array.shape for array in arrays))
        if key not in self._compiled:
            function = tf.function(self._loop, jit_compile=jit)
            # Called by itself, TensorFlow would warn that it traces a new function for every strategy.
            self._compiled[key] = function.get_concrete_function(*tensors)
        states = {field: value.numpy() for field, value in self._compiled[key](*tensors).items()}
        return [{field: value[step] for field, value in states.items()} for step in range(len(arrays[0]))]

    def _loop(self, finite: tf.Tensor, amax: tf.Tensor, counts: tf.Tensor) -> dict[str, tf.Tensor]:
        """The loop itself."""
        state = self._strategy.init()
        if finite.shape.rank > 1:
            state = type(state)(*(_repeat(value) for value in state))
        steps = finite.shape[0]
        traces = [tf.TensorArray(value.dtype, steps, element_shape=value.shape) for value in state]
        for i in tf.range(steps):
            event = Event(finite[i], *_declared(amax[i], counts[i], self._needs))
            state = self._strategy.update(state, event)
            traces = [trace.write(i, value) for trace, value in zip(traces, state, strict=True)]
        return dict(zip(state._fields, (trace.stack() for trace in traces), strict=True))

    def _require_same_kind(self, events: Sequence[_Seen], before: Any, after: Any) -> None:
        """Requires a state of the same type, dtypes and shapes."""
        if type(after) is not type(before):
            what = f"update() returned a {type(after).__name__}, not a {type(before).__name__}"
            raise self._broken("a state", events, what)
        for field, old in before._asdict().items():
            was, now = tf.convert_to_tensor(old), tf.convert_to_tensor(getattr(after, field))
            if was.dtype != now.dtype or was.shape != now.shape:
                what = f"{field} was {was.dtype.name} {was.shape} and is {now.dtype.name} {now.shape}"
                raise self._broken("a state", events, what)

    def _require_bounds(self, events: Sequence[_Seen], loss_scale: float) -> None:
        """Requires a scale within the bounds."""
        low, high = map(float, base.float_bounds_of(self._strategy))
        if not low <= loss_scale <= high:
            raise self._broken("bounds", events, f"the loss scale is {loss_scale:g}, outside [{low:g}, {high:g}]")

    def _require_equal(
        self,
        invariant: str,
        events: Sequence[_Seen],
        name: str,
        found: dict[str, np.ndarray],
        other_name: str,
        expected: dict[str, np.ndarray],
    ) -> None:
        """Requires the same state, bit for bit."""
        for field, value in expected.items():
            if not np.array_equal(found[field], value, equal_nan=value.dtype.kind == "f"):
                what = f"{field} is {found[field]} {name}, but {value} {other_name}"
                raise self._broken(invariant, events, what)

    def _broken(self, invariant: str, events: Sequence[_Seen], what: str) -> AssertionError:
        """The error that names an invariant and the events before."""
        runs = [(seen, len(list(same))) for seen, same in itertools.groupby(events)]
        shown = [(_shown(seen, self._needs), count) for seen, count in runs]
        steps = ", ".join(text if count == 1 else f"{count} times {text}" for text, count in shown) or "no step"
        return AssertionError(f"{self._strategy!r} breaks an invariant, {invariant}: {what}; after {steps}.")

    @contextlib.contextmanager
    def _named(self, invariant: str, events: Sequence[_Seen]) -> Iterator[None]:
        """Says which invariant was being checked when the strategy itself raised."""
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            raise self._broken(invariant, events, f"it raised {type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def _only_declared(self, events: Sequence[_Seen], event: _Watched) -> Iterator[_Watched]:
        """Turns a failure caused by a statistic that the strategy did not declare into a sentence that says so."""
        try:
            yield event
        except Exception as error:
            missed = vars(event).get("missed")
            if not missed:
                raise
            argument = "edges=(...)" if missed[-1] == "histogram" else f"{missed[-1]}=True"
            declared = f"needs = hs.strategies.Needs({argument})"
            what = f"it uses event.{missed[-1]}, which is None unless it is declared: {declared}"
            raise self._broken("declared statistics", events, what) from error

    @contextlib.contextmanager
    def _no_variables(self, events: Sequence[_Seen]) -> Iterator[None]:
        """Refuses variables that are made within it."""

        def refuse(_next_creator: Callable, **_options: Any) -> NoReturn:
            raise self._broken("purity", events, "a variable was made; keep everything in the state")

        with tf.variable_creator_scope(refuse):
            yield


def _stacked(word: list[_Seen]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The steps of a word as arrays."""
    finite, amax, counts = zip(*word, strict=True)
    return np.array(finite, bool), np.array(amax, np.float32), np.array(counts, np.int64)


def _declared(amax: tf.Tensor, counts: tf.Tensor, needs: Needs) -> tuple:
    """The statistics of an event that the strategy declares, None in the place of the others."""
    # Of the gradients' norm and of the loss they are as good an example as any.
    norm, loss = (amax if needs.norm else None), (amax if needs.loss else None)
    return (amax if needs.amax else None), (counts if needs.edges else None), norm, loss


def _repeat(value: tf.Tensor) -> tf.Tensor:
    """A value for each of the words that run side by side."""
    value = tf.convert_to_tensor(value)
    return tf.tile(value[..., tf.newaxis], [1] * value.shape.rank + [WORDS])


def _event(seen: _Seen, needs: Needs) -> Event:
    """The event of a step."""
    amax, counts = tf.constant(seen.amax, tf.float32), tf.constant(seen.counts, tf.int64)
    return Event(tf.constant(seen.finite), *_declared(amax, counts, needs))


def _values(state: Any) -> dict[str, np.ndarray]:
    """The fields of a state as arrays."""
    return {field: np.array(tf.convert_to_tensor(value)) for field, value in state._asdict().items()}


def _shown(seen: _Seen, needs: Needs) -> str:
    """A step in words."""
    parts = [f"amax={seen.amax:g}"] * needs.amax + [f"histogram={list(seen.counts)}"] * bool(needs.edges)
    return ("finite" if seen.finite else "non-finite") + (f" ({', '.join(parts)})" if parts else "")
