"""The policy for a scaler that makes no progress: when it finds it stuck, and what it does then.

Guards line 6 of the promise: it never sticks silently.
"""

import warnings

import fault_cases
import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler


def skipping(stuck=None, **strategy):
    """A scaler, and a compiled step: "0" is bad data, "i" an overflow of a finite loss, "1" is applied."""
    weight = tf.Variable([1.0], name="kernel")
    loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10, **strategy), stuck=stuck)

    @tf.function
    def step(factor):
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(weight - tf.stop_gradient(weight)) * factor)
        loss_scaler.apply(lambda grads, variables: None, tape.gradient(scaled, [weight]), [weight])

    def take(word):
        for letter in word:
            step(np.float32({"1": 1.0, "0": np.nan, "i": 1e38}[letter]))

    return loss_scaler, take


@pytest.mark.slow_with("1")
@pytest.mark.exhaustive_with("100")
@pytest.mark.parametrize("limit", [1, 2, 100])
def test_it_raises_after_so_many_consecutive_skips_and_not_before(limit):
    loss_scaler, take = skipping(scaler.StuckPolicy(consecutive_skips=limit, skip_rate=None))
    take("1" + "0" * (limit - 1) + "1" + "0" * (limit - 1))
    loss_scaler.check()
    take("0")
    said = "the last step was skipped" if limit == 1 else f"{limit} steps in a row were skipped"
    with pytest.raises(scaler.StuckError, match=rf"stuck: {said}.*'kernel:0'.*NaN"):
        loss_scaler.check()
    with pytest.raises(scaler.ScalerError):
        loss_scaler.check()
    take("1")
    loss_scaler.check()


@pytest.mark.parametrize(("letter", "limit"), [("i", 100), ("0", 50)])
def test_by_default_it_raises_after_100_and_after_50_of_bad_data(letter, limit):
    loss_scaler, take = skipping()
    take("1" + letter * (limit - 1))
    loss_scaler.check()
    take(letter)
    with pytest.raises(scaler.StuckError, match=f"{limit} steps"):
        loss_scaler.check()
    take("1")
    loss_scaler.check()


def test_bad_data_is_told_as_bad_data():
    """One bad batch in four costs no scale, and is said."""
    loss_scaler, take = skipping()
    take("1110" * 49)
    loss_scaler.check()
    take("1110")
    with pytest.raises(
        scaler.StuckError, match=r"50 of the last 200 .* look at the data, .*loss itself was not finite"
    ):
        loss_scaler.check()
    assert float(loss_scaler.loss_scale) == 2.0**10
    assert int(loss_scaler.counters.attempted) == 200
    assert int(loss_scaler.counters.skipped) == 50


def test_bad_data_in_a_row_begins_anew_after_an_applied_step():
    policy = scaler.StuckPolicy(consecutive_bad_losses=3, bad_loss_rate=None)
    loss_scaler, take = skipping(policy)
    for word in ("00", "1", "00", "iii"):
        take(word)
        loss_scaler.check()
    assert int(loss_scaler.counters.consecutive_skips) == 5
    take("0")
    said = "3 steps since the last applied one were skipped because of a loss that was not finite"
    with pytest.raises(scaler.StuckError, match=said):
        loss_scaler.check()


def test_counts_of_bad_data_are_restored(tmp_path):
    policy = scaler.StuckPolicy(consecutive_bad_losses=3)
    loss_scaler, take = skipping(policy)
    take("1100")
    path = tf.train.Checkpoint(loss_scaler=loss_scaler).save(str(tmp_path / "ckpt"))
    other, take = skipping(policy)
    tf.train.Checkpoint(loss_scaler=other).restore(path).assert_consumed()
    assert [int(one) for one in other.counters] == [4, 2, 2, 2]
    take("0")
    with pytest.raises(scaler.StuckError, match="3 steps since the last applied one"):
        other.check()


def test_it_warns_once_each_time_it_gets_stuck():
    loss_scaler, take = skipping(scaler.StuckPolicy("warn", consecutive_skips=3))

    def warned():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss_scaler.check()
        assert all(issubclass(one.category, scaler.StuckWarning) for one in caught)
        assert all(one.filename == __file__ for one in caught)
        return len(caught)

    seen = []
    for word in ("00", "0", "0", "1", "000", "0"):
        take(word)
        seen.append(warned())
    assert seen == [0, 1, 0, 0, 1, 0]


def test_continue_says_nothing():
    loss_scaler, take = skipping(scaler.StuckPolicy("continue", consecutive_skips=1, at_floor=True, skip_rate=0.1))
    take("0" * 30)
    loss_scaler.check()


def test_none_is_never():
    loss_scaler, take = skipping(scaler.StuckPolicy(consecutive_skips=None))
    take("i" * 120)
    loss_scaler.check()
    never = scaler.StuckPolicy(consecutive_skips=None, consecutive_bad_losses=None)
    loss_scaler, take = skipping(never)
    take("0" * 120)
    loss_scaler.check()


def test_at_the_floor():
    policy = scaler.StuckPolicy(consecutive_skips=None, at_floor=True)
    loss_scaler, take = skipping(policy, min_scale=2.0**8, growth_interval=1)
    take("00000i")
    loss_scaler.check()
    take("i0")
    with pytest.raises(scaler.StuckError, match="a step was skipped and the loss scale is at its floor, 256"):
        loss_scaler.check()
    take("1")
    loss_scaler.check()


def test_bad_data_at_the_floor_says_nothing_about_it():
    policy = scaler.StuckPolicy(consecutive_skips=None, at_floor=True)
    loss_scaler, take = skipping(policy, min_scale=2.0**8)
    take("ii100")
    assert float(loss_scaler.loss_scale) == 2.0**8
    loss_scaler.check()
    take("i0")
    with pytest.raises(scaler.StuckError, match="at its floor, 256"):
        loss_scaler.check()


def test_at_the_ceiling():
    policy = scaler.StuckPolicy(at_ceiling=True)
    loss_scaler, take = skipping(policy, max_scale=2.0**12, growth_interval=1)
    take("1")
    loss_scaler.check()
    take("1")
    with pytest.raises(scaler.StuckError) as caught:
        loss_scaler.check()
    assert str(caught.value).endswith("the loss scale is at its ceiling, 4096.")
    take("i")
    loss_scaler.check()


@pytest.mark.parametrize("strategy", [scaler.NoScaling(), scaler.Static(8.0)])
def test_a_scale_that_cannot_move_is_at_no_bound(strategy):
    loss_scaler = scaler.LossScaler(strategy, stuck=scaler.StuckPolicy(at_floor=True, at_ceiling=True))
    loss_scaler.update(scaler.Event(tf.constant(False)))
    loss_scaler.check()


def test_the_skip_rate_over_the_last_steps():
    loss_scaler, take = skipping(scaler.StuckPolicy(consecutive_skips=None, skip_rate=0.5, over=10))
    take("i" * 9)
    loss_scaler.check()  # Fewer than `over` steps say nothing.
    take("1")
    with pytest.raises(scaler.StuckError, match="9 of the last 10 steps were skipped"):
        loss_scaler.check()
    for letter in "1111i1111i":
        take(letter)
        try:
            loss_scaler.check()
        except scaler.StuckError:
            continue
    loss_scaler.check()  # The window has moved on.
    for _ in range(5):
        take("1i")
        loss_scaler.check()  # Half is not more than half.
    take("i")
    with pytest.raises(scaler.StuckError, match=r"6 of the last 1[01] steps"):
        loss_scaler.check()


def test_it_goes_on_after_a_restored_checkpoint(tmp_path):
    loss_scaler, take = skipping(scaler.StuckPolicy(consecutive_skips=3, skip_rate=0.5, over=4))
    path = tf.train.Checkpoint(loss_scaler=loss_scaler).save(str(tmp_path / "ckpt"))
    take("11110")
    loss_scaler.check()
    tf.train.Checkpoint(loss_scaler=loss_scaler).restore(path)
    loss_scaler.check()
    take("1111")
    loss_scaler.check()
    take("000")
    with pytest.raises(scaler.StuckError):
        loss_scaler.check()


@pytest.mark.slow_with("raise-1")
@pytest.mark.exhaustive_with("continue-1", "warn-5")
@pytest.mark.parametrize(("action", "steps_per_call"), [("raise", 1), ("raise", 5), ("warn", 5), ("continue", 1)])
def test_a_loop_checks_at_each_visit(action, steps_per_call):
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    policy = scaler.StuckPolicy(action, consecutive_skips=5)
    loss_scaler = scaler.LossScaler(scaler.Dynamic(), stuck=policy)
    step = loops.TrainStep(model, fault_cases.loss_fn, keras.optimizers.SGD(), loss_scaler=loss_scaler)
    parts = [tf.stack([part] * 12) for part in fault_cases.batch(factor=np.nan)]
    visits = []
    loop = loops.Loop(
        step, tf.data.Dataset.from_tensor_slices(tuple(parts)), steps_per_call=steps_per_call, actions=[visits.append]
    )
    if action == "raise":
        with pytest.raises(scaler.StuckError, match="5 steps in a row"):
            loop.run(10)
        # The actions have seen the steps by then.
        assert visits[-1].counters.data == loop.counters.data == 5
    elif action == "warn":
        with pytest.warns(scaler.StuckWarning) as caught:
            loop.run(10)
        assert len(caught) == 1
    else:
        loop.run(10)
    assert loop.counters.skipped == loop.counters.data


def test_it_is_refused_inside_a_graph():
    loss_scaler = scaler.LossScaler()
    with pytest.raises(scaler.InvalidArgument, match=r"outside of the tf\.function"):
        tf.function(loss_scaler.check)()


@pytest.mark.parametrize(
    "arguments",
    [
        {"action": "stop"},
        {"action": None},
        {"consecutive_skips": 0},
        {"consecutive_skips": 1.5},
        {"consecutive_skips": True},
        {"skip_rate": 0.0},
        {"skip_rate": 1.0},
        {"skip_rate": float("nan")},
        {"skip_rate": "often"},
        {"over": 0},
        {"over": None},
    ],
    ids=str,
)
def test_bad_policies_are_refused_with_what_was_passed(arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(scaler.InvalidArgument, match=f"{name}={value!r}"):
        scaler.StuckPolicy(**arguments)


@pytest.mark.parametrize("flag", ["at_floor", "at_ceiling"])
def test_flags_must_be_flags(flag):
    with pytest.raises(scaler.InvalidArgument, match=f"{flag}='yes'"):
        scaler.StuckPolicy(**{flag: "yes"})


def test_something_that_is_no_policy_is_refused():
    with pytest.raises(scaler.InvalidArgument, match="stuck='raise'"):
        scaler.LossScaler(stuck="raise")
