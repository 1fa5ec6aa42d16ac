"""Fault 9: state saved by one version of a strategy and loaded by another, and checkpoints with absurd numbers in them.

Guards lines 2 and 7 of the promise. Fields that one side does not have keep their initial value or are left out; a
scale out of bounds counts as the nearest bound and a NaN as the initial scale; one update heals the state.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from fault_cases import run_in
from rigs import assert_finite

import scaler
from scaler.checks import LARGEST_SCALE, SMALLEST_SCALE


class OldState(NamedTuple):
    loss_scale: tf.Tensor
    good_steps: tf.Tensor


class NewState(NamedTuple):
    loss_scale: tf.Tensor
    good_steps: tf.Tensor
    lowest: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Halving:
    """A strategy of somebody's own, without bounds, in two versions."""

    state: type = OldState

    def init(self):
        extra = {} if self.state is OldState else {"lowest": tf.constant(8.0)}
        return self.state(loss_scale=tf.constant(1024.0), good_steps=tf.constant(0), **extra)

    def update(self, state, event):
        scale = tf.where(event.finite, state.loss_scale, state.loss_scale * 0.5)
        extra = {} if self.state is OldState else {"lowest": tf.minimum(state.lowest, scale)}
        return self.state(loss_scale=scale, good_steps=state.good_steps + tf.cast(event.finite, tf.int32), **extra)


STRATEGIES = {
    "static": lambda: scaler.Static(64.0),
    "none": scaler.NoScaling,
    "dynamic": lambda: scaler.Dynamic(2.0**12),
    "old": Halving,
    "new": lambda: Halving(NewState),
}


def finite(value):
    return scaler.Event(tf.constant(value))


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        *(("dynamic", "static"), ("dynamic", "old"), ("static", "none"), ("none", "dynamic")),
        *(("old", "dynamic"), ("old", "new"), ("new", "old"), ("new", "new")),
    ],
)
def test_one_strategys_checkpoint_in_another(tmp_path, earlier, later):
    saved, loaded = scaler.LossScaler(STRATEGIES[earlier]()), scaler.LossScaler(STRATEGIES[later]())
    for value in (True, True, False, True):
        saved.update(finite(value))
    fresh = {name: float(value) for name, value in loaded.state._asdict().items()}
    path = tf.train.Checkpoint(loss_scaler=saved).save(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(loss_scaler=loaded).restore(path)
    assert [int(count) for count in loaded.counters] == [4, 3, 1, 0]
    before, after = saved.state._asdict(), loaded.state._asdict()
    for name, value in after.items():
        if name == "loss_scale" and later in ("static", "none"):
            assert float(value) == fresh[name]
        else:
            assert float(value) == (float(before[name]) if name in before else fresh[name])
    loaded.update(finite(False))
    loaded.update(finite(True))
    assert np.isfinite(float(loaded.loss_scale))
    assert int(loaded.counters.attempted) == 6


def test_a_warm_up_begins_again_and_who_asks_is_told(tmp_path):
    """What `docs/strategies.md` says of fields that only one of two strategies has."""
    saved, plain = scaler.LossScaler(scaler.Dynamic(2.0**12)), scaler.Dynamic(2.0**12)
    for _ in range(3):
        saved.update(finite(False))
    path = tf.train.Checkpoint(loss_scaler=saved).save(str(tmp_path / "ckpt"))
    loaded = scaler.LossScaler(scaler.strategies.Warmup(plain, 100))
    status = tf.train.Checkpoint(loss_scaler=loaded).restore(path)
    assert float(loaded.loss_scale) == 2.0**9
    assert (int(loaded.state.warmup_steps), float(loaded.state.target_scale)) == (0, 2.0**12)
    with pytest.raises(AssertionError):
        status.assert_consumed()


BAD = {
    "zero": (0.0, "low"),
    "negative": (-8.0, "low"),
    "negative infinity": (-np.inf, "low"),
    "subnormal": (1e-44, "low"),
    "below": (2.0**-30, "low"),
    "above": (2.0**60, "high"),
    "infinity": (np.inf, "high"),
    "NaN": (np.nan, "initial"),
}
BOUNDED = {
    "dynamic": (lambda: scaler.Dynamic(2.0**12), {"low": 2.0**-14, "high": 2.0**40, "initial": 2.0**12}),
    "static": (lambda: scaler.Static(64.0), {"low": 64.0, "high": 64.0, "initial": 64.0}),
}


def corrupt(loss_scaler, **fields):
    """Gives the state numbers that no strategy would write, as a checkpoint may."""
    for name, value in fields.items():
        loss_scaler._state[name].assign(value)


def test_a_checkpoint_brings_whatever_it_holds(tmp_path):
    saved, loaded = (scaler.LossScaler(scaler.Dynamic(64.0)) for _ in range(2))
    corrupt(saved, loss_scale=np.nan, good_steps=-5, budget=-(2**31))
    path = tf.train.Checkpoint(loss_scaler=saved).save(str(tmp_path / "bad"))
    tf.train.Checkpoint(loss_scaler=loaded).restore(path).assert_consumed()
    for field, variable in loaded._state.items():
        np.testing.assert_array_equal(variable.numpy(), saved._state[field].numpy())
    assert float(loaded.loss_scale) == 64.0


@pytest.mark.slow_with("xla-dynamic")
@pytest.mark.parametrize(("mode", "strategy"), [("eager", "static"), ("loop", "dynamic"), ("xla", "dynamic")])
def test_a_bad_scale_is_never_used_and_heals(mode, strategy):
    make, bounds = BOUNDED[strategy]
    weight, loss_scaler = tf.Variable([1.0, 2.0]), scaler.LossScaler(make())

    def step(factor):
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(weight) * factor)
        outcome = loss_scaler.apply(lambda g, v: v[0].assign_sub(g[0]), tape.gradient(scaled, [weight]), [weight])
        return {"applied": outcome.finite, "loss_scale": outcome.loss_scale}

    run = run_in(mode, step)
    for bad, bound in BAD.values():
        corrupt(loss_scaler, loss_scale=bad)
        assert float(loss_scaler.loss_scale) == float(loss_scaler.state.loss_scale) == bounds[bound]
        (output,) = run([(np.float32(0.5),)])
        assert output["applied"]
        assert output["loss_scale"] == bounds[bound]
        if strategy == "dynamic":
            assert loss_scaler._state["loss_scale"].numpy() == bounds[bound]
        assert_finite([weight])
        assert not run([(np.float32(np.nan),)])[0]["applied"]
        assert bounds["low"] <= float(loss_scaler.loss_scale) <= bounds["high"]
    np.testing.assert_array_equal(weight.numpy(), [1 - 0.5 * len(BAD), 2 - 0.5 * len(BAD)])


def test_a_strategy_without_bounds_gets_the_widest():
    widest = {"low": SMALLEST_SCALE, "high": LARGEST_SCALE, "initial": 1024.0}
    loss_scaler = scaler.LossScaler(Halving())
    for bad, (value, bound) in BAD.items():
        corrupt(loss_scaler, loss_scale=value)
        assert float(loss_scaler.loss_scale) == (value if bad in ("below", "above") else widest[bound]), bad


@pytest.mark.parametrize(
    ("good", "budget"), [(-5, -7), (2**31 - 1, 0), (-(2**31), 2**31 - 1), (-5, -(2**31)), (2**31 - 1, 2**31 - 1)]
)
def test_absurd_counts_heal(good, budget):
    loss_scaler = scaler.LossScaler(scaler.Dynamic(64.0, growth_interval=3, hysteresis=2))
    corrupt(loss_scaler, good_steps=good, budget=budget)
    loss_scaler.update(finite(True))
    assert float(loss_scaler.loss_scale) in (64.0, 128.0)
    assert 0 <= int(loss_scaler.state.good_steps) <= 3
    assert int(loss_scaler.state.budget) <= 2
    for _ in range(3):
        loss_scaler.update(finite(True))
    assert float(loss_scaler.loss_scale) >= 128.0
    top = float(loss_scaler.loss_scale)
    for _ in range(2):
        loss_scaler.update(finite(False))
    assert float(loss_scaler.loss_scale) == top / 2
    assert 0 <= int(loss_scaler.state.budget) <= 2
