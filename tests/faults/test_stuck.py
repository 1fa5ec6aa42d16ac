"""The policy for a scaler that makes no progress: when it finds it stuck, and what it does then.

Guards line 6 of the promise: it never sticks silently.
"""

import functools

import fault_cases
import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from scaler import StuckPolicy

BOUNDS = {"min_scale": 2.0**-14, "max_scale": 2.0**40, "growth_interval": 2000}


@functools.cache
def compiled():
    """A scaler whose bounds are variables, and its step: it is traced once."""
    bounds = {name: tf.Variable(value) for name, value in BOUNDS.items()}
    weight = tf.Variable([1.0], name="kernel")
    loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10, **bounds))

    @tf.function
    def step(factor):
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(weight - tf.stop_gradient(weight)) * factor)
        loss_scaler.apply(lambda grads, variables: None, tape.gradient(scaled, [weight]), [weight])

    return loss_scaler, step, bounds, [(variable, variable.numpy()) for variable in loss_scaler.variables]


def skipping(stuck=None, **others):
    """A scaler as new, and what it takes: "0" is bad data, "i" an overflow of a finite loss, "1" is applied."""
    loss_scaler, step, bounds, start = compiled()
    loss_scaler.stuck = stuck or StuckPolicy()
    for name, value in {**BOUNDS, **others}.items():
        bounds[name].assign(value)
    for variable, value in start:
        variable.assign(value)

    def take(word):
        for letter in word:
            step(np.float32({"1": 1.0, "0": np.nan, "i": 1e38}[letter]))

    return loss_scaler, take


def told(loss_scaler):
    """What a check raises, or nothing."""
    try:
        loss_scaler.check()
    except scaler.StuckError as error:
        return str(error)
    return ""


def in_a_row(limit):
    """Twice one skip less than the limit; then the last."""
    row = "1" + "0" * (limit - 1)
    return [(row + row, False), ("0", True), ("1", False)]


GOOD, BAD, EITHER = False, True, None
# A policy, bounds of the strategy, and steps with the verdict after them.
CASES = {
    "1 in a row": ({"consecutive_skips": 1, "skip_rate": None}, {}, in_a_row(1)),
    "2 in a row": ({"consecutive_skips": 2, "skip_rate": None}, {}, in_a_row(2)),
    "100 by default": ({}, {}, [("1" + "i" * 99, GOOD), ("i", BAD), ("1", GOOD)]),
    "50 of bad data by default": ({}, {}, [("1" + "0" * 49, GOOD), ("0", BAD), ("1", GOOD)]),
    "one bad batch in four": ({}, {}, [("1110" * 49, GOOD), ("1110", BAD)]),
    "bad data since an applied step": (
        {"consecutive_bad_losses": 3, "bad_loss_rate": None},
        {},
        [("00", GOOD), ("1", GOOD), ("00", GOOD), ("iii", GOOD), ("0", BAD)],
    ),
    "continue": (
        {"action": "continue", "consecutive_skips": 1, "at_floor": True, "skip_rate": 0.1},
        {},
        [("0" * 30, GOOD)],
    ),
    "none is never": ({"consecutive_skips": None}, {}, [("i" * 120, GOOD)]),
    "none is never, of bad data": (
        {"consecutive_skips": None, "consecutive_bad_losses": None},
        {},
        [("0" * 120, GOOD)],
    ),
    "floor": (
        {"consecutive_skips": None, "at_floor": True},
        {"min_scale": 2.0**8, "growth_interval": 1},
        [("00000i", GOOD), ("i0", BAD), ("1", GOOD)],
    ),
    "bad data at the floor": (
        {"consecutive_skips": None, "at_floor": True},
        {"min_scale": 2.0**8},
        [("ii100", GOOD), ("i0", BAD)],
    ),
    "ceiling": (
        {"at_ceiling": True},
        {"max_scale": 2.0**12, "growth_interval": 1},
        [("1", GOOD), ("1", BAD), ("i", GOOD)],
    ),
    # Fewer steps than `over` say nothing, half is not more than half, and steps that went out of the window are over.
    "rate": (
        {"consecutive_skips": None, "skip_rate": 0.5, "over": 10},
        {},
        [
            ("i" * 9, GOOD),
            ("1", BAD),
            *[(letter, EITHER) for letter in "1111i1111i"],
            ("", GOOD),
            *[("1i", GOOD)] * 5,
            ("i", BAD),
        ],
    ),
}


@pytest.mark.parametrize(("policy", "bounds", "words"), CASES.values(), ids=CASES)
def test_it_is_told_after_these_steps_and_not_before(policy, bounds, words, snapshot):
    loss_scaler, take = skipping(StuckPolicy(**policy), **bounds)
    said = []
    for word, stuck in words:
        take(word)
        sentence = told(loss_scaler)
        if stuck is not EITHER:
            assert bool(sentence) == stuck, word
            said.append(
                "".join(sentence.partition("The step was skipped because")[:2])
            )  # What follows is what `explain` says.
    assert [sentence for sentence in said if sentence] == snapshot
    assert int(loss_scaler.counters.skipped) == sum(len(word) - word.count("1") for word, _ in words)


def test_it_goes_on_after_a_restored_checkpoint(tmp_path):
    loss_scaler, take = skipping(StuckPolicy(consecutive_skips=3, consecutive_bad_losses=3, skip_rate=0.5, over=4))
    checkpoint = tf.train.Checkpoint(loss_scaler=loss_scaler)
    path = checkpoint.save(str(tmp_path / "ckpt"))
    take("11110")
    loss_scaler.check()
    checkpoint.restore(path)
    loss_scaler.check()
    take("1111")
    loss_scaler.check()
    take("iii")
    assert told(loss_scaler)
    # Counts of bad data are restored as well.
    checkpoint.restore(path)
    take("1100")
    path = checkpoint.save(str(tmp_path / "bad"))
    take("1")
    checkpoint.restore(path).assert_consumed()
    assert [int(one) for one in loss_scaler.counters] == [4, 2, 2, 2]
    take("0")
    assert "3 steps since the last applied one" in told(loss_scaler)


def test_a_loop_checks_at_each_visit():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    policy = scaler.StuckPolicy(consecutive_skips=5)
    loss_scaler = scaler.LossScaler(scaler.Dynamic(), stuck=policy)
    step = loops.TrainStep(model, fault_cases.loss_fn, keras.optimizers.SGD(), loss_scaler=loss_scaler)
    parts = [tf.stack([part] * 12) for part in fault_cases.batch(factor=np.nan)]
    visits = []
    loop = loops.Loop(step, tf.data.Dataset.from_tensor_slices(tuple(parts)), steps_per_call=5, actions=[visits.append])
    with pytest.raises(scaler.StuckError, match="5 steps in a row"):
        loop.run(10)
    # The actions have seen the steps by then.
    assert visits[-1].counters.data == loop.counters.data == 5
    assert loop.counters.skipped == loop.counters.data


def test_something_that_is_no_policy_is_refused():
    with pytest.raises(scaler.InvalidArgument, match="stuck='raise'"):
        scaler.LossScaler(stuck="raise")
