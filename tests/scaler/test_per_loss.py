"""Guards several losses with a scale each: one decision for the step, a backoff for the guilty alone."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from rigs import raw
from scaler_cases import modes, plain_descent, said
from step_programs import trace_no_branches
from ways import graph

import scaler
from scaler import Cause, Dynamic, InvalidArgument, NoScaling, PerLoss

TRUE = {"large": np.float32([0.5, -2.0]), "small": np.float32([2.0**-20, 2.0**-22])}
START = {"large": (2.0**4, 3), "small": (2.0**30, 2)}
CLEAN, OVERFLOW, NAN = np.float32(1.0), np.float32(1e35), np.float32(np.nan)
"""Factors of a loss: at a scale of 2^14 and more the second overflows, though the loss is finite."""


def strategies():
    return {name: Dynamic(scale, growth_interval=interval) for name, (scale, interval) in START.items()}


def written(execute, losses, weights, targets=None, optimizer=plain_descent, state=(), **options):
    def step(factors):
        before = scaler.snapshot(state)
        for variable in state:
            variable.assign_add(1.0)
        with tf.GradientTape(persistent=True) as tape:
            values = tf.cast(weights, tf.float32)
            scaled = losses.scale({name: tf.reduce_sum(values * TRUE[name]) * factors[name] for name in TRUE})
        grads = {name: tape.gradient(loss, [weights]) for name, loss in scaled.items()}
        return losses.apply(optimizer, grads, targets or [weights], rollback=before, **options)

    return execute(step)


@functools.cache
def traced():
    """Two weights, their losses and a compiled step, which many tests take from the start."""
    weights, losses = tf.Variable([0.0, 0.0], name="weight"), PerLoss(strategies())
    start = [variable.numpy() for variable in (weights, *losses.variables)]
    return weights, losses, written(graph, losses, weights), start


def fresh():
    weights, losses, step, start = traced()
    for variable, value in zip((weights, *losses.variables), start, strict=True):
        variable.assign(value)
    return weights, losses, step


class Reference:
    """Apex's rule in plain Python: a scale and a count for each loss, the sum for the weights."""

    def __init__(self):
        self.weights = np.float32([0, 0])
        self.scales = {name: scale for name, (scale, _) in START.items()}
        self.good = dict.fromkeys(START, 0)

    def step(self, factors):
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = {n: TRUE[n] * factors[n] * np.float32(self.scales[n]) for n in TRUE}
            grads = {n: scaled[n] / np.float32(self.scales[n]) for n in TRUE}
            finite = {n: bool(np.isfinite(np.sum(np.square(grads[n])))) for n in TRUE}
        applied = all(finite.values())
        if applied:
            self.weights = self.weights - (grads["large"] + grads["small"])
        for name, (_, interval) in START.items():
            if np.isnan(factors[name]):
                continue  # Bad data of this loss.
            self.good[name] = self.good[name] + 1 if finite[name] else 0
            if not finite[name]:
                self.scales[name] = max(self.scales[name] / 2, 2.0**-14)
            elif self.good[name] == interval:
                self.scales[name], self.good[name] = self.scales[name] * 2, 0
        return applied


def random_word(steps=40):
    rng = np.random.default_rng(0)
    return [dict(zip(TRUE, rng.choice([CLEAN, CLEAN, CLEAN, OVERFLOW, NAN], 2), strict=True)) for _ in range(steps)]


@pytest.mark.slow_with("xla")
@modes("graph", "xla")
def test_only_the_guilty_back_off_and_one_skips_for_all(execute):
    weights, losses, step = fresh()
    step = step if execute is tf.function else written(execute, losses, weights)
    reference, applied = Reference(), 0
    for factors in random_word():
        outcome, wanted = step(factors), reference.step(factors)
        applied += wanted
        assert bool(outcome.finite) == wanted
        np.testing.assert_array_equal(weights.numpy(), reference.weights)
        assert {name: losses[name].loss_scale.numpy() for name in losses.names} == reference.scales
    assert 10 < applied < 30
    assert [int(count) for count in losses.counters][:3] == [40, applied, 40 - applied]


def test_counters_of_a_loss_are_its_own():
    _, losses, step = fresh()
    for large, small in [(1, 1), (NAN, 1), (NAN, 1), (1, 1)]:
        step({"large": np.float32(large), "small": np.float32(small)})
    assert [int(count) for count in losses.counters] == [4, 2, 2, 0]
    assert [int(count) for count in losses["large"].counters] == [4, 2, 2, 0]
    assert [int(count) for count in losses["small"].counters] == [4, 4, 0, 0]
    assert losses["small"].loss_scale.numpy() == 2.0**32  # Two growths: steps that another loss spoiled count.


def test_the_outcome_is_that_of_the_guilty():
    _, losses, step = fresh()
    outcome = step({"large": CLEAN, "small": CLEAN})
    assert (int(outcome.cause), int(outcome.index)) == (Cause.NONE, -1)
    np.testing.assert_allclose(outcome.grad_norm, np.linalg.norm(sum(TRUE.values())), rtol=1e-6)
    assert losses.explain(outcome) == "The step was applied at loss scale 1.07374e+09."
    outcome = step({"large": CLEAN, "small": OVERFLOW})
    assert (int(outcome.cause), float(outcome.loss_scale), int(outcome.index)) == (Cause.OVERFLOW, 2.0**30, 0)
    assert "overflowed at loss scale 1.07374e+09; the gradient of 'weight:0'" in losses.explain()
    outcome = step({"large": NAN, "small": OVERFLOW})
    assert (int(outcome.cause), float(outcome.loss_scale), bool(outcome.has_nan)) == (Cause.LOSS, 2.0**4, True)
    assert "loss itself was not finite" in losses["large"].explain()
    assert "backward pass overflowed" in losses["small"].explain()


def test_a_sum_too_large_is_no_losss_fault():
    """Each loss's gradients are finite with their norm, and so is their sum, but not its square."""
    weight, losses = tf.Variable([0.0]), PerLoss({"a": Dynamic(1.0), "b": Dynamic(1.0)})
    grads = {name: [tf.constant([1.5e19])] for name in "ab"}
    losses.scale({"a": 1.0, "b": 1.0})
    outcome = losses.apply(plain_descent, grads, [weight])
    assert not outcome.finite
    assert (int(outcome.cause), float(outcome.loss_scale)) == (Cause.TOO_LARGE, 1.0)
    assert weight.numpy() == 0.0
    assert [losses[name].loss_scale.numpy() for name in "ab"] == [1.0, 1.0]


def test_the_sum_is_clipped_and_masters_and_state_follow():
    weights, statistic = tf.Variable(tf.zeros([2], tf.float16)), tf.Variable(1.0, trainable=False)
    masters, losses = scaler.MasterWeights([weights]), PerLoss(strategies())
    step = written(lambda step: step, losses, weights, masters, state=[statistic], clip_norm=2.0**-10)
    step({"large": CLEAN, "small": CLEAN})
    total = np.float32(2.0**-10) / np.linalg.norm(sum(TRUE.values())) * sum(TRUE.values())
    np.testing.assert_allclose(masters.weights[0].numpy(), -total, rtol=1e-3)
    np.testing.assert_array_equal(weights.numpy(), masters.weights[0].numpy().astype(np.float16))
    assert statistic.numpy() == 2.0
    before = raw([weights], masters.weights)
    step({"large": CLEAN, "small": NAN})
    assert statistic.numpy() == 2.0
    assert raw([weights], masters.weights) == before


def test_stochastic_rounding_counts_a_step_once():
    weights = tf.Variable(tf.zeros([2], tf.bfloat16))
    rounding, losses = scaler.weights.StochasticRounding([weights]), PerLoss(strategies())
    step = written(lambda step: step, losses, weights, rounding)
    step({"large": CLEAN, "small": CLEAN})
    assert rounding._steps.numpy() == 1


def test_losses_may_reach_different_variables_and_rows():
    """Of `table` both gradients are rows, and of `shared` one is."""
    table, shared, own = tf.Variable(tf.zeros([4, 2])), tf.Variable([0.0, 0.0]), tf.Variable([0.0])
    losses = PerLoss({"a": Dynamic(8.0), "b": Dynamic(2.0)})
    with tf.GradientTape(persistent=True) as tape:
        a = tf.reduce_sum(tf.gather(table, [0, 1, 1])) + tf.reduce_sum(tf.gather(shared, [0, 1, 1]))
        b = 3.0 * tf.reduce_sum(tf.gather(table, [1, 3])) + tf.reduce_sum(shared) + tf.reduce_sum(own)
        scaled = losses.scale({"a": a, "b": b})
    grads = {name: tape.gradient(loss, [table, shared, own]) for name, loss in scaled.items()}
    assert isinstance(grads["a"][0], tf.IndexedSlices)
    assert grads["a"][2] is None
    assert losses.apply(plain_descent, grads, [table, shared, own]).finite
    np.testing.assert_array_equal(table.numpy(), -np.repeat(np.float32([[1], [5], [0], [3]]), 2, axis=1))
    np.testing.assert_array_equal(shared.numpy(), [-2.0, -3.0])
    np.testing.assert_array_equal(own.numpy(), [-1.0])


def test_each_strategy_has_its_own_statistics():
    losses = PerLoss({"large": scaler.Headroom(headroom=1), "small": scaler.Histogram(2.0**10, edge=4.0)})
    step = written(lambda step: step, losses, tf.Variable([0.0, 0.0]))
    step({"large": CLEAN, "small": np.float32(2.0**20)})
    assert losses["large"].loss_scale.numpy() == 2.0**13  # Of an amax of 2: the other loss's is not in it.
    assert losses["small"].loss_scale.numpy() == 2.0**9  # Both gradients, 1024 and 256, are above the edge.


def test_adam_moves_by_the_sum_and_a_skip_leaves_its_slots():
    weights, losses = tf.Variable([1.0, 2.0]), PerLoss(strategies())
    plain, optimizer, other = tf.Variable([1.0, 2.0]), keras.optimizers.Adam(0.1), keras.optimizers.Adam(0.1)

    step = written(lambda step: step, losses, weights, optimizer=optimizer)
    for _ in range(2):
        step({"large": CLEAN, "small": CLEAN})
        other.apply([tf.constant(sum(TRUE.values()))], [plain])
    np.testing.assert_array_equal(weights.numpy(), plain.numpy())
    before = raw(optimizer.variables, [weights])
    assert not step({"large": OVERFLOW * 2, "small": OVERFLOW}).finite
    assert raw(optimizer.variables, [weights]) == before


@pytest.mark.slow
def test_it_is_restored_whole(tmp_path):
    word, path, (weights, losses, step) = random_word(24), str(tmp_path / "half"), fresh()
    for factors in word[:12]:
        step(factors)
    tf.train.Checkpoint(losses=losses, weights=weights).write(path)
    for factors in word[12:]:
        step(factors)
    others, restored = tf.Variable([0.0, 0.0], name="weight"), PerLoss(strategies())
    tf.train.Checkpoint(losses=restored, weights=others).read(path).assert_consumed()
    step = written(lambda step: step, restored, others)  # Eager mode has the same bits.
    for factors in word[12:]:
        step(factors)
    assert raw([weights], losses.variables) == raw([others], restored.variables)


def test_a_stuck_loss_is_named():
    losses = PerLoss(strategies(), stuck=scaler.StuckPolicy(consecutive_skips=2))
    step = written(lambda step: step, losses, tf.Variable([0.0, 0.0]))
    step({"large": CLEAN, "small": NAN})
    losses.check()
    step({"large": NAN, "small": CLEAN})
    with pytest.raises(
        scaler.StuckError,
        match=r"^PerLoss, which decides about its losses .*'large'.* together, is stuck: 2 steps.* loss itself",
    ):
        losses.check()
    step({"large": NAN, "small": CLEAN})
    with pytest.raises(
        scaler.StuckError, match=r"^Loss 'large': The loss scaler with Dynamic\(.*\) is stuck: 2 steps in a row"
    ):
        losses.check()


@pytest.mark.parametrize("kinds", [(Dynamic(), Dynamic()), (NoScaling(), Dynamic())], ids=["moving", "one fixed"])
def test_gradients_of_the_other_loss_are_refused_by_its_name(kinds, monkeypatch):
    trace_no_branches(monkeypatch)
    weights, losses = [tf.Variable([1.0, 2.0], name="kernel")], PerLoss(dict(zip("ab", kinds, strict=True)))

    @graph
    def step(first, second):
        with tf.GradientTape(persistent=True) as tape:
            scaled = losses.scale({"a": tf.reduce_sum(weights[0] ** 2), "b": tf.reduce_sum(weights[0])})
        grads = {"a": tape.gradient(scaled[first], weights), "b": tape.gradient(scaled[second], weights)}
        return losses.apply(plain_descent, grads, weights).finite

    with pytest.raises(InvalidArgument, match=r"^apply: loss 'a' was given gradients of loss 'b'"):
        step("b", "a")
    with pytest.raises(InvalidArgument, match=r"^apply: loss 'b' was given gradients of loss 'a'"):
        step("a", "a")
    if isinstance(kinds[0], NoScaling):  # Two that move are right in all other tests.
        step.get_concrete_function("a", "b")


def test_what_cannot_work_is_refused(snapshot):
    calls = {
        "no strategy": lambda: PerLoss({}),
        "a list": lambda: PerLoss([Dynamic()]),
        "a name that is none": lambda: PerLoss({1: Dynamic()}),
        "a class": lambda: PerLoss({"a": Dynamic}),
        "another name": lambda: PerLoss({"a": Dynamic()})["b"],
        "losses of other names": lambda: PerLoss({"a": Dynamic()}).scale({"b": 1.0}),
        "a number for the losses": lambda: PerLoss({"a": Dynamic()}).scale(1.0),
        "a loss with a shape": lambda: PerLoss({"a": Dynamic()}).scale({"a": [1.0, 2.0]}),
        "gradients of one of two": lambda: applied({"a": [tf.constant(1.0)]}),
        "no gradients": lambda: applied({"a": [tf.constant(1.0)], "b": []}),
        "another shape": lambda: applied({"a": [tf.constant(1.0)], "b": [tf.constant([1.0, 2.0])]}),
        "text": lambda: applied({"a": [tf.constant(1.0)], "b": ["large"]}),
        "None": lambda: applied({"a": [tf.constant(1.0)], "b": [None]}),
    }
    assert {name: said(call) for name, call in calls.items()} == snapshot


def applied(grads):
    return PerLoss({"a": NoScaling(), "b": NoScaling()}).apply(plain_descent, grads, [tf.Variable(1.0)])
