"""What is proven of optimizers holds for the worst gradients, weights and learning rates that the proof allows."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs import raw
from scaler_cases import modes, modes_with
from ways import graph

import scaler
from scaler.gate.optimizers import move_nothing
from scaler.gate.proofs import largest_learning_rate

OPT = keras.optimizers
MAX = np.finfo(np.float32).max
LARGEST_GRADIENT = np.sqrt(MAX, dtype=np.float32)
"""Its square is finite, and no larger one's is."""
GRADIENTS = np.float32([0, 2.0**-149, 2.0**-126, 1e-20, 2.0**-30, 1, 65504, 2.0**63, LARGEST_GRADIENT])
WEIGHTS = np.float32([0, 1, -1, 2.0**-126, MAX, -MAX])
WIDTH, STEPS = 256, 16

PROVEN = {
    "SGD": lambda: OPT.SGD(1.0),
    "momentum, largest": lambda: OPT.SGD(1.0, momentum=1 - 2.0**-20, nesterov=True),
    "decay": lambda: OPT.SGD(1.0, weight_decay=0.9),
    "Adam without memory": lambda: OPT.Adam(1.0, beta_1=0.0, beta_2=2.0**-20),
    "Adam, short second": lambda: OPT.Adam(1.0, beta_1=0.99, beta_2=0.1),
    "amsgrad": lambda: OPT.Adam(1.0, amsgrad=True),
    "AdamW": lambda: OPT.AdamW(1.0, weight_decay=0.1),
    "Adamax": lambda: OPT.Adamax(1.0),
    "Nadam": lambda: OPT.Nadam(1.0),
    "Lion": lambda: OPT.Lion(1.0, weight_decay=0.01),
    "RMSprop": lambda: OPT.RMSprop(1.0),
    "RMSprop, momentum": lambda: OPT.RMSprop(1.0, rho=0.5, momentum=0.9),
    "EMA": lambda: OPT.Adam(1.0, use_ema=True, ema_overwrite_frequency=3),
    "clipnorm": lambda: OPT.Adam(1.0, clipnorm=1.0),
}
UNPROVEN = {
    "Adadelta": lambda: OPT.Adadelta(1.0),
    "Adafactor": lambda: OPT.Adafactor(0.01),
    "Adagrad": lambda: OPT.Adagrad(0.1),
    "Ftrl": lambda: OPT.Ftrl(0.1),
    "Lamb": lambda: OPT.Lamb(0.01),
    "centered": lambda: OPT.RMSprop(0.01, centered=True),
    "an average that grows": lambda: OPT.RMSprop(0.01, rho=0.011),
    "momentum of 1": lambda: OPT.SGD(0.1, momentum=1.0),
    "beta of nearly 1": lambda: OPT.Adam(0.1, beta_1=1 - 2.0**-25),
    "second beta of nearly 1": lambda: OPT.Nadam(0.1, beta_2=1 - 2.0**-25),
    "no epsilon": lambda: OPT.Adam(0.1, epsilon=0.0),
    "tiny epsilon": lambda: OPT.Adam(0.1, epsilon=1e-16),
    "negative epsilon": lambda: OPT.RMSprop(0.1, epsilon=-1e-7),
    "decay that diverges": lambda: OPT.SGD(0.1, weight_decay=3.0),
    "negative decay": lambda: OPT.SGD(0.1, weight_decay=-0.1),
    "a limit beyond float32": lambda: OPT.SGD(0.1, clipnorm=1e20),
    "an infinite limit": lambda: OPT.SGD(0.1, global_clipnorm=np.inf),
    "a number that is a variable": lambda: OPT.Adam(0.1, beta_1=tf.Variable(0.9)),
    "a rate that counts its calls": lambda: OPT.SGD(lambda: 0.1),
    "accumulation": lambda: OPT.SGD(0.1, gradient_accumulation_steps=2),
    "a subclass": lambda: type("Own", (OPT.Adam,), {})(0.1),
    "a function": lambda: lambda grads, variables: None,
}


@pytest.mark.parametrize("name", PROVEN)
def test_the_worst_that_a_proof_allows_stays_finite(name):
    make = PROVEN[name]
    probe = make()
    weight = keras.Variable(np.zeros(WIDTH, np.float32), name="w")
    probe.build([weight])

    @graph
    def steps(grads):
        def once(number):
            probe.apply([grads[number]], [weight])
            return [number + 1]

        tf.while_loop(lambda number: number < STEPS, once, [0])

    rate = largest_learning_rate(probe, [weight])
    assert rate >= 1.0

    @settings(max_examples=10)
    @given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, -1.0, 2.0**-10, 1e-3 / rate]))
    def run(seed, share):
        rng = np.random.default_rng(seed)
        for variable in probe.variables:
            variable.assign(tf.zeros_like(variable))
        if hasattr(probe, "_u_product"):
            probe._u_product.assign(1.0)
        probe.learning_rate = share * rate
        # A decay works on weights of a size that training reaches.
        weight.assign(rng.choice(WEIGHTS[:4] if probe.weight_decay or probe.use_ema else WEIGHTS, WIDTH))
        shape = STEPS, WIDTH
        steps(tf.constant(rng.choice(GRADIENTS, shape) * rng.choice(np.float32([1, -1]), shape)))
        for variable in (weight, *probe.variables):
            assert np.isfinite(tf.cast(variable, tf.float32)).all(), variable.path

    run()


@pytest.mark.parametrize("name", UNPROVEN)
def test_nothing_is_proven_of_others(name):
    assert largest_learning_rate(UNPROVEN[name](), [tf.Variable([1.0])]) is None


def test_a_constraint_may_return_anything():
    free, bound = tf.Variable([1.0]), keras.Variable([1.0], name="w")
    bound.constraint = keras.constraints.NonNeg()
    assert largest_learning_rate(OPT.SGD(0.1), [free]) is not None
    assert largest_learning_rate(OPT.SGD(0.1), [free, bound]) is None


def test_what_moves_nothing_makes_nothing():
    assert largest_learning_rate(move_nothing, [tf.Variable([1.0])]) == float("inf")


@modes("eager", "graph")
def test_a_learning_rate_that_the_proof_is_not_about_skips_the_step(execute):
    weight, optimizer = tf.Variable([1.0, 2.0]), OPT.AdamW(0.1, weight_decay=0.5)
    loss_scaler = scaler.LossScaler(scaler.Static(1.0), select=True)
    step = execute(lambda grad: loss_scaler.apply(optimizer, [grad], [weight]))
    assert bool(step(tf.ones(2)).finite)
    kept = [variable for variable in (weight, *optimizer.variables) if "learning" not in variable.name]
    for rate in (np.nan, np.inf, -np.inf, 1e30, -1.0):
        before = raw(kept)
        optimizer.learning_rate = rate
        outcome = step(tf.ones(2))
        assert not bool(outcome.finite)
        assert scaler.Cause(int(outcome.cause)) is scaler.Cause.UPDATE
        assert "learning rate of AdamW" in loss_scaler.explain(outcome)
        assert raw(kept) == before
        optimizer.learning_rate = 0.1
        assert bool(step(tf.ones(2)).finite)


def test_a_negative_rate_lets_no_weight_grow_by_its_decay_in_a_branch():
    weight, optimizer = tf.Variable([1.0, 2.0]), OPT.SGD(0.1, weight_decay=0.5)
    loss_scaler = scaler.LossScaler(scaler.Static(1.0), select=False)
    step = graph(lambda: loss_scaler.apply(optimizer, [tf.zeros(2)], [weight]))
    assert bool(step().finite)
    before = weight.numpy()
    optimizer.learning_rate = -1.0
    outcome = step()
    assert not bool(outcome.finite)
    assert "negative with a weight decay" in loss_scaler.explain(outcome)
    np.testing.assert_array_equal(weight, before)
    optimizer.learning_rate = 0.1
    assert bool(step().finite)


def test_a_schedule_that_gives_nan_skips_its_steps():
    class Broken(OPT.schedules.LearningRateSchedule):
        def __call__(self, step):
            return tf.where(tf.equal(step, 1), np.nan, 0.1)

    weight, optimizer = tf.Variable([1.0]), OPT.SGD(Broken())
    loss_scaler = scaler.LossScaler(scaler.Static(1.0))
    step = graph(lambda: loss_scaler.apply(optimizer, [tf.ones(1)], [weight]).finite)
    assert [bool(step()) for _ in range(3)] == [True, False, False]
    np.testing.assert_allclose(weight, 0.9)


@modes("eager", "graph")
def test_a_learning_rate_that_counts_its_calls_is_called_once_a_step(execute):
    calls, weight = tf.Variable(0.0), tf.Variable([1.0])
    optimizer, loss_scaler = OPT.SGD(lambda: calls.assign_add(1.0) * 0.25), scaler.LossScaler(scaler.Static(1.0))
    step = execute(lambda grad: loss_scaler.apply(optimizer, [grad], [weight]).finite)
    assert [bool(step(tf.constant([value]))) for value in (1.0, np.nan, 1.0)] == [True, False, True]
    assert float(calls) == 2.0
    np.testing.assert_array_equal(weight, [0.25])


def test_numbers_that_are_variables_work_in_a_function():
    weight, optimizer = tf.Variable([1.0]), OPT.Adam(0.1, beta_1=tf.Variable(0.5), epsilon=tf.Variable(0.5))
    loss_scaler = scaler.LossScaler(scaler.Static(1.0))
    assert bool(graph(lambda: loss_scaler.apply(optimizer, [tf.ones(1)], [weight]).finite)())


@pytest.mark.slow_with("xla-arguments2")
@modes_with(
    ("arguments",),
    eager=[({"clipnorm": 1e20},)],
    graph=[({"global_clipnorm": np.inf},)],
    xla=[({"global_clipnorm": np.inf},)],
)
def test_clipping_of_the_optimizers_own_makes_no_infinity(arguments, execute):
    weight, optimizer = tf.Variable([1.0, 2.0]), OPT.SGD(0.1, **arguments)
    loss_scaler = scaler.LossScaler(scaler.Static(1.0))
    step = execute(lambda grad: loss_scaler.apply(optimizer, [grad], [weight]))
    outcome = step(tf.constant([1e19, 1.0]))
    assert np.isfinite(weight).all()
    if not bool(outcome.finite):
        assert scaler.Cause(int(outcome.cause)) is scaler.Cause.UPDATE
        np.testing.assert_array_equal(weight, [1.0, 2.0])
