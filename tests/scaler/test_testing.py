"""Guards `scaler.testing.check_strategy`: it passes what keeps the promise, and names what a broken one breaks."""

import dataclasses
import itertools
import sys
from typing import ClassVar, NamedTuple

import pytest
import tensorflow as tf

import scaler
from scaler.testing import check_strategy


class State(NamedTuple):
    loss_scale: tf.Tensor
    steps: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Counting:
    """Doubles every third finite step, halves at a non-finite one: what the broken ones below are made from."""

    min_scale: ClassVar[float] = 2.0**-10
    max_scale: ClassVar[float] = 2.0**10

    def init(self):
        return State(tf.constant(1.0), tf.constant(0))

    def update(self, state, event):
        steps = tf.where(event.finite, state.steps + 1, 0)
        factor = tf.where(event.finite, tf.where(steps % 3 == 0, 2.0, 1.0), 0.5)
        return State(self.bounded(state.loss_scale * factor), steps)

    def bounded(self, loss_scale):
        return tf.clip_by_value(loss_scale, self.min_scale, self.max_scale)


class NoFloor(Counting):
    def bounded(self, loss_scale):
        return tf.minimum(loss_scale, self.max_scale)


class NoCeiling(Counting):
    def bounded(self, loss_scale):
        return tf.maximum(loss_scale, self.min_scale)


class StartsOutside(Counting):
    def init(self):
        return State(tf.constant(2.0**20), tf.constant(0))


class Remembers(Counting):
    seen: ClassVar = itertools.count()

    def update(self, state, event):
        return super().update(state, event)._replace(steps=tf.constant(next(self.seen)))


class StartsAnew(Counting):
    seen: ClassVar = itertools.count(1)

    def init(self):
        return State(tf.constant(float(next(self.seen))), tf.constant(0))


class MakesVariables(Counting):
    def update(self, state, event):
        return super().update(State(tf.Variable(state.loss_scale).value(), state.steps), event)


class KnowsTheMode(Counting):
    def update(self, state, event):
        after = super().update(state, event)
        return after if tf.executing_eagerly() else after._replace(steps=after.steps + 1)


class NoGraph(Counting):
    def update(self, state, event):
        return super().update(state, event) if bool(event.finite.numpy()) else state


class Mixes(Counting):
    """Takes the greatest of what stands side by side."""

    def update(self, state, event):
        after = super().update(state, event)
        return after._replace(loss_scale=tf.reduce_max(after.loss_scale) + 0.0 * after.loss_scale)


class ChangesDtype(Counting):
    def update(self, state, event):
        after = super().update(state, event)
        return after._replace(steps=tf.cast(after.steps, tf.int64))


class ChangesType(Counting):
    def update(self, state, event):
        return tuple(super().update(state, event))


class HalfScale(Counting):
    def init(self):
        return State(tf.constant(1.0, tf.float16), tf.constant(0))


class Undeclared(Counting):
    """Uses what it has not asked for."""

    def update(self, state, event):
        return State(self.bounded(1.0 / event.amax), state.steps)


class Uncounted(Counting):
    def update(self, state, event):
        return State(self.bounded(1.0 / tf.cast(event.histogram[0], tf.float32)), state.steps)


class Raises(Counting):
    """Looks whether there are statistics, which it may, and fails for another reason."""

    def update(self, state, event):
        raise KeyError("nowhere" if self.min_scale else event)


class Numbers(Counting):
    def init(self):
        return State(tf.constant(1.0), 0)


class Plain(Counting):
    def init(self):
        return (tf.constant(1.0), tf.constant(0))


BROKEN = {
    NoFloor: r"bounds: the loss scale is 0\.000488281, outside \[0\.000976562, 1024\]; after 11 times non-finite\.$",
    NoCeiling: r"bounds: the loss scale is 2048, outside .*; after 33 times finite\.$",
    StartsOutside: r"bounds: the loss scale is 1\.04858e\+06, outside .*; after no step",
    Remembers: r"purity: steps is \d+ the same update again, but \d+ once; after non-finite\.$",
    StartsAnew: r"purity: loss_scale is 2\.0 init\(\), but 1\.0 a first init\(\)",
    MakesVariables: "purity: a variable was made",
    KnowsTheMode: r"the same values in eager mode and in a graph: steps is \d in a graph, but \d in eager mode; after",
    NoGraph: "the same values in eager mode and in a loop: it raised AttributeError",
    Mixes: "elementwise: loss_scale is .* beside others, but .* alone; after",
    ChangesDtype: "a state: steps was int32 .* and is int64",
    ChangesType: r"a state: update\(\) returned a tuple, not a State",
    HalfScale: "a state: loss_scale has dtype float16, not float32",
    Undeclared: (
        r"declared statistics: it uses event\.amax, .*: needs = hs\.strategies\.Needs"
        r"\(amax=True\); after non-finite"
    ),
    Uncounted: (
        r"declared statistics: it uses event\.histogram, .*: needs = hs\.strategies\.Needs"
        r"\(edges=\(\.\.\.\)\); after"
    ),
    Raises: "an update in eager mode: it raised KeyError: 'nowhere'; after non-finite",
    Numbers: r"a state: init\(\) returned steps=0 \(int\), which is not a tensor: tf\.constant\(0\); after no step",
    Plain: r"a state: init\(\) returned \(.*\), which is not a NamedTuple; after no step",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_strategy_is_named_with_what_it_breaks(kind):
    with pytest.raises(AssertionError, match=BROKEN[kind]) as caught:
        check_strategy(kind(), examples=3)
    assert str(caught.value).startswith(f"{kind()!r} breaks an invariant, ")


def test_a_state_that_a_checkpoint_does_not_bring_back_is_noticed(monkeypatch):
    monkeypatch.setattr(tf.train.Checkpoint, "read", lambda self, path: None)
    with pytest.raises(AssertionError, match=r"save and restore: .* restored, but .* never stopped; after"):
        check_strategy(Counting(), examples=2)


def test_what_is_no_strategy_is_refused():
    with pytest.raises(scaler.InvalidArgument, match=r"^check_strategy\(.*Counting.*\): expected a strategy"):
        check_strategy(Counting)


def test_without_hypothesis_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(scaler.ScalerError, match="pip install hypothesis"):
        check_strategy(Counting())


def test_a_strategy_that_keeps_the_promise_passes():
    @dataclasses.dataclass(frozen=True)
    class Looks(Counting):
        needs: ClassVar[scaler.strategies.Needs] = scaler.strategies.Needs(edges=(1.0, 2.0))

        def update(self, state, event):
            assert event.amax is None
            assert event.histogram.shape[0] == 3
            return super().update(state, event)

    check_strategy(Looks(), examples=2)
