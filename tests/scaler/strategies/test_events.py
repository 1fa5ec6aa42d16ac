"""Guards what an event must look like, and that what is wrong with one or with a strategy is said by the right name."""

import numpy as np
import pytest
import tensorflow as tf

import scaler
from scaler import Event, InvalidArgument, LossScaler
from scaler.layerwise import AdaptiveScale, LayerEvent, Layerwise

TRUE = tf.constant(True)


REFUSED = [
    (scaler.Dynamic(), Event(tf.constant([True]))),
    (scaler.Dynamic(), Event(tf.constant(1.0))),
    (scaler.Headroom(), Event(TRUE, amax=tf.constant([1.0, 2.0]))),
    (scaler.Headroom(), Event(TRUE, amax=tf.constant(3))),
    (scaler.Dynamic(), Event(TRUE, amax=tf.constant([1.0]))),
    *[
        (scaler.Histogram(edge=4.0), Event(TRUE, histogram=histogram))
        for histogram in (tf.constant([1, 2, 3], tf.int64), tf.constant(1), tf.constant([0.5, 0.5]))
    ],
    (scaler.Dynamic(), Event(TRUE, histogram=tf.constant([[1]]))),
    (scaler.Histogram(), Event(TRUE)),
    (scaler.Headroom(), Event(TRUE)),
]


def test_an_event_of_another_form_is_refused_and_moves_nothing(snapshot):
    said = []
    for strategy, event in REFUSED:
        loss_scaler = LossScaler(strategy)
        with pytest.raises(InvalidArgument) as caught:
            loss_scaler.update(event)
        said.append(str(caught.value))
        assert int(loss_scaler.counters.attempted) == 0
    assert said == snapshot


def test_statistics_that_nobody_needs_are_taken_and_left():
    loss_scaler = LossScaler(scaler.Dynamic())
    loss_scaler.update(Event(TRUE, amax=tf.constant(1.0), histogram=tf.constant([1, 2, 3])))
    assert int(loss_scaler.counters.applied) == 1


@pytest.mark.parametrize(
    "strategy",
    [scaler.Headroom(), scaler.DelayedAmax(history_length=2), scaler.LogNormal(), AdaptiveScale(8.0)],
)
def test_an_amax_of_nan_counts_as_infinity(strategy):
    def after(amax):
        if isinstance(strategy, AdaptiveScale):
            event = LayerEvent(TRUE, tf.constant(amax), tf.constant(1.0), tf.constant(1.0), TRUE)
        else:
            event = Event(TRUE, amax=tf.constant(amax))
        return [value.numpy() for value in strategy.update(strategy.init(), event)]

    for found, wanted in zip(after(np.nan), after(np.inf), strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert np.isfinite(found).all()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (LossScaler, "LossScaler"),
        (lambda thing: scaler.strategies.Bounded(thing, 1.0, 2.0), "Bounded"),
        (lambda thing: scaler.strategies.Warmup(thing, 5), "Warmup"),
        (scaler.strategies.RisingFloor, "RisingFloor"),
        (lambda thing: scaler.strategies.Scheduled({0: thing}), "Scheduled"),
        (lambda thing: Layerwise({"a": [tf.Variable(1.0)]}, strategy=thing), "Layerwise"),
    ],
)
def test_who_refuses_a_strategy_says_its_own_name(make, name):
    with pytest.raises(InvalidArgument, match=rf"^{name}\('dynamic'\): expected a strategy"):
        make("dynamic")


class HalfState(scaler.strategies.StaticState):
    """The state of `Half`."""


class Half(scaler.NoScaling):
    scale = tf.constant(1.0, tf.float16)

    def init(self):
        return HalfState(self.scale)


@pytest.mark.parametrize("scale", [tf.constant(1.0, tf.float16), tf.constant(1.0, tf.float64), 8, "a", tf.ones([1])])
def test_a_state_without_a_scalar_float32_scale_is_refused(scale, monkeypatch):
    monkeypatch.setattr(Half, "scale", scale)
    with pytest.raises(InvalidArgument, match=r"Half.init\(\) returned HalfState.* named loss_scale, of dtype float32"):
        LossScaler(Half())


@pytest.mark.parametrize(("saved", "loaded"), [(5, 3), (3, 5)])
def test_a_history_of_another_length_is_refused_in_a_sentence(tmp_path, saved, loaded):
    first, second = (LossScaler(scaler.DelayedAmax(history_length=length)) for length in (saved, loaded))
    path = tf.train.Checkpoint(loss_scaler=first).write(str(tmp_path / "state"))
    with pytest.raises(InvalidArgument, match=rf"DelayedAmax's history with shape \({saved},\), .* has \({loaded},\)"):
        tf.train.Checkpoint(loss_scaler=second).read(path)
    third = LossScaler(scaler.DelayedAmax(history_length=saved))
    first.update(Event(TRUE, amax=tf.constant(2.0)))
    path = tf.train.Checkpoint(loss_scaler=first).write(str(tmp_path / "later"))
    tf.train.Checkpoint(loss_scaler=third).read(path).assert_consumed()
    np.testing.assert_array_equal(third.state.history, [0.0] * (saved - 1) + [2.0])


def test_layers_frozen_after_masters_were_made_are_named():
    weights = [tf.Variable([1.0], dtype=tf.float16), tf.Variable([2.0], dtype=tf.float16)]
    masters, loss_scaler = scaler.MasterWeights(weights), LossScaler(scaler.NoScaling())
    with pytest.raises(InvalidArgument, match=r"1 gradients for 2 variables.*frozen or unfrozen since MasterWeights"):
        loss_scaler.apply(lambda grads, variables: None, [tf.constant([1.0])], masters)
