"""An update that makes a value which is not finite, of finite gradients, leaves every bit as it was and says why."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from rigs import raw
from scaler_cases import by_hand, compile_updates, modes, modes_with

import scaler

OPT = keras.optimizers
HUGE = 1.5e19
"""Its square is finite in float32, and twice that is not."""


class Poisoned(OPT.SGD):
    """An optimizer of a user's, which makes a NaN of a gradient of exactly 3, in a slot or in the weight."""

    def __init__(self, place):
        super().__init__(0.5, momentum=0.5)
        self.place = place

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        spoiled = tf.where(tf.equal(gradient, 3.0), np.float32(np.nan), 0.0)
        target = self.momentums[self._get_variable_index(variable)] if self.place == "slot" else variable
        self.assign_add(target, tf.cast(spoiled, target.dtype))


def poison(grads, variables):
    for grad, variable in zip(grads, variables, strict=True):
        variable.assign_sub(tf.where(tf.equal(grad, 3.0), np.float32(np.inf), grad))


def rows_and_columns(rows=(1.0, 1.0)):
    """A gradient like that of a dense layer with a dead unit, after a pixel that is always 0."""
    return np.float32([[0, 0], [rows[0], 0], [rows[1], 0]])


FAULTS = {
    # optimizer, a good gradient, one that makes it fail, and the name of what is not finite then
    "Adafactor": (lambda: OPT.Adafactor(0.01), np.ones((3, 2)), rows_and_columns(), "weight", "a NaN"),
    "Adagrad": (lambda: OPT.Adagrad(0.01), np.ones(2), np.float32([HUGE, 0]), "accumulator", "an infinity"),
    "Ftrl": (lambda: OPT.Ftrl(0.01), np.ones(2), np.float32([HUGE, 0]), "weight", "a NaN"),
    "a slot of a user's": (lambda: Poisoned("slot"), np.ones(2), np.float32([1, 3]), "momentum", "a NaN"),
    "a weight of a user's": (lambda: Poisoned("weight"), np.ones(2), np.float32([1, 3]), "weight", "a NaN"),
    "a function": (lambda: poison, np.ones(2), np.float32([1, 3]), "weight", "an infinity"),
}


class Run:
    """One variable, trained by an optimizer that fails on some gradients."""

    def __init__(self, fault, execute, dtype="float32", rollback=False):
        self.fault = fault
        make, self.good, self.bad, self.name, self.value = FAULTS[fault]
        self.weight = keras.Variable(np.ones(np.shape(self.good)), dtype=dtype, name="weight")
        self.state = tf.Variable([0.0], trainable=False)
        self.optimizer, self.loss_scaler = make(), scaler.LossScaler(scaler.Dynamic(8.0))
        self.masters = scaler.MasterWeights([self.weight])
        if hasattr(self.optimizer, "build"):
            self.optimizer.build(self.masters.weights)

        def step(grad):
            before = scaler.snapshot([self.state]) if rollback else None
            if rollback:
                self.state.assign_add([1.0])
            scaled = [tf.cast(grad, tf.float32) * self.loss_scaler.loss_scale]
            return self.loss_scaler.apply(self.optimizer, scaled, self.masters, rollback=before)

        self._step = execute(step)

    def step(self, grad):
        return self._step(tf.constant(grad, tf.float32))

    def bits(self):
        own = getattr(self.optimizer, "variables", ())
        variables = [self.weight, self.state, *self.masters.weights, *own]
        return raw(variables)

    def fail(self):
        """The outcome of the step at which the optimizer fails; those before it are applied."""
        if self.fault != "Adafactor":  # It only divides by 0 at its first step.
            assert bool(self.step(self.good).finite)
        for _ in range(4):
            before = self.bits()
            outcome = self.step(self.bad)
            if not bool(outcome.finite):
                assert self.bits() == before
                return outcome
        raise AssertionError("it did not fail")


@pytest.mark.slow_with("graph-Adafactor")
@modes_with(
    ("fault",),
    eager=[("Ftrl",), ("a weight of a user's",), ("a function",)],
    graph=[("Adafactor",), ("Adagrad",), ("a slot of a user's",)],
)
def test_every_bit_is_as_before_and_the_cause_is_named(fault, execute):
    run = Run(fault, execute)
    outcome = run.fail()
    assert scaler.Cause(int(outcome.cause)) is scaler.Cause.UPDATE
    assert np.isfinite(outcome.grad_norm)
    assert np.isnan(outcome.clipped_norm)
    sentence = run.loss_scaler.explain(outcome)
    optimizer = getattr(run.optimizer, "__name__", type(run.optimizer).__name__)
    for part in (optimizer, run.name, run.value, "finite gradients"):
        assert part in sentence
    assert run.loss_scaler.explain() == sentence
    counters = run.loss_scaler.counters
    assert int(counters.consecutive_skips) == int(counters.skipped) == 1
    assert bool(run.step(run.good).finite)


@pytest.mark.slow_with("Adagrad-float16")
@pytest.mark.parametrize(("fault", "dtype"), [("Adagrad", "float16"), ("a function", "float16")])
def test_masters_the_model_and_its_state_are_put_back(fault, dtype):
    run = Run(fault, tf.function, dtype, rollback=True)
    run.fail()
    np.testing.assert_array_equal(run.state, [run.loss_scaler.counters.applied])


def test_compiled_updates_are_taken_back(monkeypatch):
    made = compile_updates(monkeypatch, 0)
    Run("Adagrad", tf.function).fail()
    assert made


@pytest.mark.slow
def test_kahan_weights_and_random_rounding_are_put_back():
    for kind in (scaler.weights.KahanWeights, scaler.weights.StochasticRounding):
        weight = keras.Variable(np.ones(2), dtype="bfloat16", name="weight")
        masters, optimizer = kind([weight]), Poisoned("weight")
        loss_scaler = scaler.LossScaler(scaler.Static(1.0))

        def step(grad, loss_scaler=loss_scaler, optimizer=optimizer, masters=masters):
            return loss_scaler.apply(optimizer, [grad], masters).finite

        step = tf.function(step) if kind is scaler.weights.KahanWeights else step
        assert bool(step(tf.constant([1.0, 0.1])))
        before = raw([weight, *masters.variables])
        assert not bool(step(tf.constant([1.0, 3.0])))
        assert raw([weight, *masters.variables]) == before


@pytest.mark.slow_with("xla")
@modes("eager", "xla")
def test_what_is_large_or_was_not_finite_before_is_not_the_updates_doing(execute):
    """The sum of the squares of large values overflows, they do not."""
    weights = [tf.Variable(tf.fill([2], 1e38)), tf.Variable([-np.inf, 1.0]), tf.Variable([1.0])]
    loss_scaler, optimizer = scaler.LossScaler(scaler.Static(1.0)), OPT.Adagrad(0.1)
    grads = [tf.ones(2), tf.constant([0.0, 1.0]), tf.ones(1)]
    step = execute(lambda: loss_scaler.apply(optimizer, grads, weights).finite)
    assert bool(step())
    assert weights[1].numpy()[0] == -np.inf
    assert weights[1].numpy()[1] < 1.0


def test_a_centered_root_mean_square_never_makes_a_nan():
    weight, optimizer = tf.Variable([0.5] * 64), OPT.RMSprop(1e-3, centered=True)
    loss_scaler = scaler.LossScaler(scaler.Static(1.0), stuck=scaler.StuckPolicy("continue"))
    step = tf.function(lambda: loss_scaler.apply(optimizer, [tf.linspace(0.5, 1.0, 64)], [weight]).finite)
    applied = [bool(step()) for _ in range(200)]
    assert applied[0]
    assert not applied[-1]
    assert np.isfinite(weight).all()
    loss_scaler.stuck = scaler.StuckPolicy(consecutive_skips=10)
    with pytest.raises(scaler.StuckError, match=r"RMSprop turned finite gradients into (a NaN|an infinity)"):
        loss_scaler.check()


@pytest.mark.slow_with("xla")
@modes("eager", "xla")
def test_a_learning_rate_that_is_not_finite_is_named_and_not_the_optimizer(execute):
    class OnceBad(OPT.schedules.LearningRateSchedule):
        def __call__(self, step):
            return tf.where(tf.equal(step, 1), float("nan"), 0.1)

    weight, optimizer = tf.Variable([1.0, 2.0]), OPT.Adagrad(OnceBad())
    loss_scaler = scaler.LossScaler(scaler.Static(1.0))
    optimizer.build([weight])
    step = execute(lambda: loss_scaler.apply(optimizer, [tf.ones(2)], [weight]))
    assert bool(step().finite)
    before = raw([weight, *optimizer.variables])
    outcome = step()
    assert not bool(outcome.finite)
    assert "the learning rate of Adagrad is NaN" in loss_scaler.explain(outcome)
    assert loss_scaler.explain() == loss_scaler.explain(outcome)
    assert raw([weight, *optimizer.variables]) == before


def test_an_optimizer_with_variables_in_a_method_is_put_back():
    class Legacy:
        def __init__(self):
            self.slot = tf.Variable([0.0, 0.0])

        def variables(self):
            return [self.slot]

        def apply(self, grads, variables):
            self.slot.assign_add(grads[0])
            poison(grads, variables)

    optimizer, weight = Legacy(), tf.Variable([1.0, 1.0])
    loss_scaler = scaler.LossScaler(scaler.Static(1.0))

    def step(grad):
        return loss_scaler.apply(optimizer, [grad], [weight]).finite

    assert [bool(step(tf.constant([1.0, second]))) for second in (0.5, 3.0, 0.5)] == [True, False, True]
    np.testing.assert_array_equal(optimizer.slot, [2.0, 1.0])
    np.testing.assert_array_equal(weight, [-1.0, 0.0])


def test_proven_optimizers_are_not_looked_at(monkeypatch):
    monkeypatch.setattr("scaler.gate.gate.Trial", None)
    weight, optimizer = tf.Variable([1.0]), OPT.Adam(0.1)
    loss_scaler = scaler.LossScaler(scaler.Static(1.0))
    assert bool(loss_scaler.apply(optimizer, [tf.ones(1)], [weight]).finite)


def test_16_bit_updates_that_were_asked_for_are_left_alone():
    weight = tf.Variable(tf.ones(1, tf.float16))
    loss_scaler = scaler.LossScaler(scaler.Static(1.0))

    def overflow(grads, variables):
        variables[0].assign(variables[0] * np.float16(np.inf))

    outcome = loss_scaler.apply(overflow, [tf.constant([3.0])], [weight], allow_16bit_updates=True)
    assert bool(outcome.finite)
    assert np.isinf(weight)


def test_slots_made_in_the_step_that_fails_are_told():
    class Lazy:
        slots = ()

        @property
        def variables(self):
            return self.slots

        def apply(self, grads, variables):
            self.slots = self.slots or [tf.Variable(tf.zeros_like(variable)) for variable in variables]
            for slot, grad, variable in zip(self.slots, grads, variables, strict=True):
                slot.assign_add(grad * grad * 1e3)
                variable.assign_sub(grad / (tf.sqrt(slot) + 1e-7))

    weight, loss_scaler = tf.Variable([1.0]), scaler.LossScaler(scaler.Static(1.0))
    with pytest.raises(scaler.InvalidArgument, match="Lazy made its variables in this very step"):
        loss_scaler.apply(Lazy(), [tf.constant([1e18])], [weight])
    np.testing.assert_array_equal(weight, [1.0])
    assert bool(loss_scaler.apply(Lazy(), [tf.constant([1.0])], [weight]).finite)


@modes_with(("clip",), eager=[("clip_norm",), ("ClipByNorm",)], graph=[("ClipByValue",)])
def test_a_limit_that_is_none_skips_the_step(clip, execute):
    weight, value = tf.Variable([1.0, 2.0]), tf.Variable(1.0)
    how = {"clip_norm": value} if clip == "clip_norm" else {"clip": getattr(scaler, clip)(value)}
    loss_scaler = scaler.LossScaler(scaler.Static(1.0))
    step = execute(lambda: loss_scaler.apply(descend, [tf.constant([3.0, 4.0])], [weight], **how))
    for limit in (np.nan, -1.0, np.inf, 0.0):
        before = weight.numpy()
        value.assign(limit)
        outcome = step()
        assert not bool(outcome.finite)
        np.testing.assert_array_equal(weight, before)
        assert "limit of the clipping" in loss_scaler.explain(outcome)
        assert loss_scaler.explain() == loss_scaler.explain(outcome)
        value.assign(1.0)
        assert bool(step().finite)


def descend(grads, variables):
    variables[0].assign_sub(grads[0])


def test_a_module_with_several_functions_is_saved_and_trains_on(tmp_path):
    """TensorFlow saves them by their names: `again` comes before what it calls."""

    class Steps(tf.Module):
        def __init__(self):
            self.weight = tf.Variable([1.0])
            self.loss_scaler, self.optimizer = scaler.LossScaler(), OPT.SGD(0.5, momentum=0.5)
            self.optimizer.build([self.weight])
            self.kept = [variable.value for variable in self.optimizer.variables]

        @tf.function
        def take(self, features):
            with tf.GradientTape() as tape:
                scaled = self.loss_scaler.scale(tf.reduce_sum(self.weight * features))
            self.loss_scaler.apply(self.optimizer, tape.gradient(scaled, [self.weight]), [self.weight])

        @tf.function
        def again(self, features):
            self.take(features)

    steps = Steps()
    steps.take(tf.ones(1))
    steps.again(tf.ones(1))
    tf.saved_model.save(steps, str(tmp_path / "steps"))
    loaded = tf.saved_model.load(str(tmp_path / "steps"))
    loaded.take(tf.ones(1))
    loaded.again(tf.ones(1))
    assert (steps.weight.numpy().tolist(), loaded.weight.numpy().tolist()) == ([-0.25], [-2.0625])


def test_xla_looks_at_an_update_too():
    """There no sum of squares is taken first."""
    weight, loss_scaler = tf.Variable([1.0, 2.0]), by_hand(scaler.Static(4.0))

    def divide(grads, variables):
        variables[0].assign(variables[0] / (1.0 - grads[0]))

    @tf.function(jit_compile=True)
    def step(grad):
        outcome = loss_scaler.apply(divide, [grad * 4.0], [weight])
        return outcome.finite, outcome.cause

    applied, cause = step(tf.constant([0.5, 1.0]))
    assert (bool(applied), int(cause)) == (False, scaler.Cause.UPDATE)
    np.testing.assert_array_equal(weight, [1.0, 2.0])
    assert step(tf.constant([0.5, 0.5]))[0]
    np.testing.assert_array_equal(weight, [2.0, 4.0])
