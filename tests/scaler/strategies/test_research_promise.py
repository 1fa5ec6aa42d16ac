"""Guards the promise for every research strategy and combinator, and what each of them refuses."""

import math

import numpy as np
import pytest
import tensorflow as tf
from rigs import scales_of

import scaler
from scaler import (
    DelayedAmax,
    Event,
    Headroom,
    Histogram,
    InvalidArgument,
    LogNormal,
    LossScaler,
    Smooth,
)
from scaler.gradients import amax, histogram
from scaler.testing import check_strategy


@pytest.mark.slow
def test_keeps_the_promise():
    check_strategy(Histogram(period=2, dead_band=1.5), examples=1)


def after(strategy, *events):
    state = strategy.init()
    for finite, largest in events:
        state = strategy.update(state, Event(tf.constant(finite), tf.constant(largest, tf.float32)))
    return state


OVERFLOW = (False, math.inf)


@pytest.mark.slow
def test_one_overflow_pins_the_published_log_normal_for_thousands_of_steps_and_not_the_repaired():
    small = Event(tf.constant(True), tf.constant(2.0**-5))

    def run(strategy):
        def go_on(state):
            return tf.while_loop(
                lambda _: True, lambda now: [strategy.update(now, small)], [state], maximum_iterations=300
            )

        state = after(strategy, *[(True, 2.0**-5)] * 20, OVERFLOW)
        return tf.function(go_on)(state)[0].loss_scale

    assert run(LogNormal(repaired=False, max_scale=2.0**24)) == 1.0
    assert run(LogNormal(max_scale=2.0**24)) >= 2.0**8


def test_gradients_of_zero_are_no_observation_where_the_published_rule_never_moves_again():
    repaired, published = LogNormal(), LogNormal(repaired=False)
    assert after(repaired, (True, 0.0)) == repaired.init()
    moved = after(repaired, (True, 0.0), (True, 2.0**6))
    assert moved.loss_scale.numpy() == 2.0**10
    stuck = [after(published, (True, 0.0), *[(True, 2.0**6)] * n).loss_scale.numpy() for n in (1, 5)]
    assert stuck[0] == stuck[1] != 2.0**10


def test_delayed_amax_of_eight_bits_reaches_their_maximum():
    exact = DelayedAmax(format="float8_e4m3fn", power_of_two=False)
    assert after(exact, (True, 3.5)).loss_scale.numpy() == 128.0
    assert after(exact, (True, 3.0)).loss_scale.numpy() == np.float32(448 / 3)
    assert after(DelayedAmax(format="float8_e5m2", margin=3), (True, 1.0)).loss_scale.numpy() == 2.0**12


def test_the_published_histogram_goes_up_and_down_for_ever_and_a_dead_band_rests():
    def scales(strategy, edges):
        state, found = strategy.init(), []
        for _ in range(20):
            gradient = tf.constant([0.75 * float(state.loss_scale), 1e-3], tf.float32)
            state = strategy.update(state, Event(tf.constant(True), histogram=histogram([gradient], edges)))
            found.append(state.loss_scale.numpy())
        return found[10:]

    assert set(scales(Histogram(), Histogram().needs.edges)) == {2.0**13, 2.0**14}
    resting = Histogram(dead_band=1.0)
    assert set(scales(resting, resting.needs.edges)) == {2.0**13}


def guided_diffusion(words):
    logarithm = 20.0
    for finite in words:
        logarithm += 1e-3 if finite else -1
        yield 2.0**logarithm


def chainer(words):
    scale, overflowed = 1.0, False
    for finite in words:
        overflowed |= not finite
        scale *= (2 ** (1 / 1000) if overflowed else 2.0) if finite else 0.5
        scale = min(max(scale, 1.0), 65504.0)
        yield scale


def dall_e(words):
    scale, last = 2.0**13, -math.inf
    for step, finite in enumerate(words):
        if finite:
            scale *= 2 ** (1 / 1000)
        elif step - last >= 125:
            scale, last = scale / math.sqrt(2), step
        scale = min(max(scale, 2.0**7), 2.0**24)
        yield scale


@pytest.mark.slow_with("guided-diffusion")
@pytest.mark.parametrize(
    ("strategy", "rule", "tolerance"),
    [
        (Smooth(min_scale=2.0**-126, max_scale=2.0**126), guided_diffusion, 0),
        (Smooth(1.0, search=True, min_scale=1.0, max_scale=65504.0), chainer, 1e-6),
        (
            Smooth(2.0**13, backoff_factor=2**-0.5, backoff_interval=125, min_scale=2.0**7, max_scale=2.0**24),
            dall_e,
            1e-6,
        ),
    ],
    ids=["guided-diffusion", "Chainer", "DALL-E"],
)
def test_smooth_is_the_family_it_names(strategy, rule, tolerance):
    words = np.random.default_rng(0).random(1500) > 0.01
    words[:20] = True

    np.testing.assert_allclose(
        tf.function(scales_of)(strategy, tf.constant(words)).numpy(), np.float32(list(rule(words))), rtol=tolerance
    )


def test_smooth_takes_up_a_scale_that_was_bounded_from_outside():
    strategy = Smooth(2.0**10)
    state = after(strategy, (True, 1.0))._replace(loss_scale=tf.constant(2.0**20))
    state = strategy.update(state, Event(tf.constant(False)))
    assert (state.loss_scale.numpy(), state.log2_scale.numpy()) == (2.0**19, 19.0)


def test_a_loss_scaler_takes_events_with_statistics_in_a_written_step():
    weight, loss_scaler = tf.Variable([2.0, 0.5]), LossScaler(Headroom(headroom=1))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(weight * [4.0, 1.0]))
        grads = loss_scaler.unscale(tape.gradient(scaled, [weight]))
        loss_scaler.update(Event(scaler.all_finite(grads), amax=amax(grads)))

    step()
    assert loss_scaler.loss_scale.numpy() == 2.0**12
    with pytest.raises(InvalidArgument, match="the event has no amax"):
        loss_scaler.update(Event(tf.constant(True)))
