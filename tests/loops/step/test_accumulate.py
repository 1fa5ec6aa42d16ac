"""Guards accumulation: k micro-batches are the large batch, and a bad one spoils its window and nothing else."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_cases import batch, dataset, static
from models import normalized, one_layer, plain_model, squared_error
from rigs import Rig, assert_finite, raw

import loops
import scaler

SIZE = 3


@pytest.mark.slow
def test_k_micro_batches_equal_the_large_batch():
    optimizers = [keras.optimizers.SGD(0.1, momentum=0.9) for _ in range(2)]
    large = [batch(number, count=12) for number in range(4)]
    small = [(x[at : at + 3], y[at : at + 3]) for x, y in large for at in range(0, 12, 3)]
    one = loops.TrainStep(plain_model(), squared_error, optimizers[0], clip_norm=0.25)
    four = Rig(plain_model(), optimizers[1], example=small[0], clip_norm=0.25, accumulate=4)
    ours, theirs = four.run(small), list(map(one, large))
    for window, whole in enumerate(theirs):
        own = ours[4 * window : 4 * window + 4]
        assert [bool(call["attempted"]) for call in own] == [False, False, False, True]
        assert [bool(call["applied"]) for call in own] == [False, False, False, True]
        np.testing.assert_allclose(np.mean([call["loss"] for call in own]), whole["loss"], rtol=1e-5)
        np.testing.assert_allclose(own[-1]["grad_norm"], whole["grad_norm"], rtol=1e-4)
        assert all(np.isnan(call["grad_norm"]) for call in own[:-1])
    expected = [*one.model.trainable_variables, *one.optimizer.variables]
    for accumulated, whole in zip(four.moved(), expected, strict=True):
        np.testing.assert_allclose(accumulated.numpy(), whole.numpy(), rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def rig():
    return Rig(normalized(), keras.optimizers.SGD(0.01, momentum=0.9), loss_scaler=static(64.0), accumulate=SIZE)


def micro_batches(word):
    """A batch for each letter, good for a ".": windows of good ones all hold the same batches."""
    bad = {".": None, "i": np.inf, "n": np.nan}
    return [batch(number % SIZE, bad=bad[letter]) for number, letter in enumerate(word)]


@pytest.mark.parametrize(("place", "bad"), [(0, "i"), (1, "n"), (2, "i")])
def test_a_bad_micro_batch_skips_its_window_only(rig, place, bad):
    word = "..." + "".join(bad if number == place else "." for number in range(SIZE)) + "..."
    rig.reset()
    calls, weights = [], []
    for one in micro_batches(word):
        calls += rig.run([one])
        assert_finite(rig.variables())
        weights.append(raw(rig.step.model.trainable_variables))
    assert [bool(call["attempted"]) for call in calls] == [False, False, True] * 3
    assert [bool(call["applied"]) for call in calls] == [False, False, True, *[False] * 5, True]
    assert weights[2] == weights[5] != weights[8]
    with_bad = raw(rig.moved())
    rig.reset()
    rig.run(micro_batches("......"))
    assert raw(rig.moved()) == with_bad
    assert rig.step.optimizer.iterations.numpy() == 2


def test_counts_are_of_windows(rig):
    rig.reset()
    rig.run(micro_batches("...i....n...."))
    counts = rig.step.loss_scaler.counters
    assert [int(count) for count in counts] == [4, 2, 2, 0]


@pytest.mark.slow
@settings(max_examples=25)
@given(word=st.text(".in", max_size=9))
def test_any_order_of_bad_micro_batches_is_as_if_their_windows_never_happened(rig, word):
    windows = [word[at : at + SIZE] for at in range(0, len(word) - len(word) % SIZE, SIZE)]
    whole = [window for window in windows if window == "." * SIZE]
    rig.reset()
    applied = 0
    for one in micro_batches("".join(windows)):
        applied += rig.run([one])[0]["applied"]
        assert_finite(rig.variables())
    assert applied == len(whole)
    after = raw(rig.moved())
    rig.reset()
    rig.run(micro_batches("".join(whole)))
    assert raw(rig.moved()) == after


def test_a_window_that_is_not_filled_moves_no_weight(rig):
    def kept():
        loss_scaler = rig.step.loss_scaler
        return raw([*rig.step.model.trainable_variables, *rig.step.optimizer.variables]), [
            value.numpy() for value in (*loss_scaler.state, *loss_scaler.counters)
        ]

    rig.reset()
    rig.run(micro_batches("..."))
    before = kept()
    calls = rig.run(micro_batches(".."))
    assert not any(call["attempted"] or call["applied"] for call in calls)
    assert kept() == before


def test_a_sum_that_overflows_skips_the_window():
    def steep(y, prediction):
        return 6e38 / 64.0 * tf.reduce_mean(tf.reduce_sum(prediction, axis=-1))  # The bias has 3e38 of each.

    step = loops.TrainStep(one_layer(), steep, keras.optimizers.SGD(0.0), loss_scaler=static(64.0), accumulate=2)
    before = raw(step.model.variables)
    step(batch())
    assert step.window.whole
    assert step(batch())["cause"] == scaler.Cause.OVERFLOW
    assert_finite([*step.window.variables, *step.loss_scaler.variables])
    assert raw(step.model.variables) == before


@pytest.mark.slow
def test_windows_in_a_loop(rig):
    """The data ends inside of a window, and inside of a call."""
    rig.reset()
    loop = loops.Loop(rig.step, dataset(11, bad=[4]), steps_per_call=4)
    with pytest.raises(loops.OutOfData, match="ended after 11 of 20 steps"):
        loop.run(20)
    counters = loop.counters
    assert (counters.data, counters.attempted, counters.applied, counters.skipped) == (11, 3, 2, 1)
    inside = raw(rig.moved())
    rig.reset()
    rig.run(list(dataset(11, bad=[4])))
    assert raw(rig.moved()) == inside
