"""Guards that Static and NoScaling never move the scale, whatever the steps show and however they are executed."""

import numpy as np
import reference
import tensorflow as tf

from scaler import Event, NoScaling, Static

SCALES = (2.0**-126, 2.0**126, 0.1)


def test_they_stay_where_they_are(execute):
    strategies = {NoScaling(): 1.0, **{Static(loss_scale): loss_scale for loss_scale in SCALES}}
    word = reference.word("101")

    def run(finite):
        states, scales = [strategy.init() for strategy in strategies], []
        for i in range(len(word)):
            updates = zip(strategies, states, strict=True)
            states = [strategy.update(state, Event(finite[i])) for strategy, state in updates]
            scales.append([state.loss_scale for state in states])
        return tf.stack(scales)

    for got, loss_scale in zip(execute(run)(word[:, 0]).numpy().T, strategies.values(), strict=True):
        np.testing.assert_array_equal(got, reference.constant(word, loss_scale)[:, 0])


def test_both_have_the_members_of_a_strategy():
    assert (Static(2.0).min_scale, Static(2.0).max_scale) == (2.0, 2.0)
    assert (NoScaling.min_scale, NoScaling.max_scale) == (1.0, 1.0)


def test_static_takes_a_tensor():
    assert Static(tf.constant(64.0)).init().loss_scale.numpy() == 64.0
