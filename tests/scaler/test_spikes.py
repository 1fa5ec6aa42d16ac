"""Guards what a spike does to a step: it moves nothing, is told with its numbers, and never goes on for ever."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from rigs import raw
from scaler_cases import modes, take

import scaler
from scaler import Cause, Dynamic, SpikeGuard, StuckError

SLOPE, SPIKE = 2.0, 500.0


class Line:
    """A line with a moving state, a momentum and masters, so that everything that a skip has to put back is there."""

    def __init__(self, execute=tf.function, strategy=None, **arguments):
        self.weight = tf.Variable([0.5, -0.5], dtype=tf.float16, name="line")
        self.moving = tf.Variable(0.0, trainable=False)
        self.masters = scaler.MasterWeights([self.weight])
        self.loss_scaler = scaler.LossScaler(strategy or guarded(), **arguments)
        self.optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
        self.optimizer.build(self.masters.weights)
        self.take = execute(self._take)
        self._start = [np.asarray(variable) for variable in self.variables()]

    def reset(self, stuck=None):
        """As if it had just been made: nothing is traced again."""
        for variable, value in zip(self.variables(), self._start, strict=True):
            variable.assign(value)
        self.loss_scaler.stuck = stuck or scaler.StuckPolicy()
        return self

    def _take(self, slope, loss):
        before = scaler.snapshot([self.moving])
        with tf.GradientTape() as tape:
            self.moving.assign_add(slope)
            own = tf.reduce_sum(tf.cast(self.weight, tf.float32) * slope)
            # The value is `loss`, the derivative that of the line.
            scaled = self.loss_scaler.scale(own - tf.stop_gradient(own) + loss)
        grads = tape.gradient(scaled, [self.weight])
        return self.loss_scaler.apply(self.optimizer, grads, self.masters, rollback=before, clip_norm=5.0)

    def variables(self):
        own = [self.weight, self.moving, *self.masters.weights, *self.optimizer.variables]
        return [*own, *self.masters.variables, *self.loss_scaler.variables]

    def step(self, slope=SLOPE, loss=1.0):
        return self.take(tf.constant(slope), tf.constant(loss))

    def moved(self):
        return raw([self.weight, self.moving], self.masters.weights, self.optimizer.variables)


def guarded(**arguments):
    return SpikeGuard(Dynamic(2.0**4, growth_interval=4), **{"window": 5, "share": 0.4, **arguments})


@functools.cache
def shared(select):
    return Line(select=select)


def warmed(line=None, **arguments):
    """A line after five steps."""
    line = (line or shared(None)).reset(**arguments)
    assert all(bool(line.step().finite) for _ in range(5))
    return line


def holds_a_spike_back(line, of):
    """A warmed line at a spike moves nothing, says why, and applies the next step."""
    before, state, counted = line.moved(), line.loss_scaler.state, list(map(int, line.loss_scaler.counters))
    outcome = line.step(SPIKE) if of == "norm" else line.step(loss=50.0)
    assert (bool(outcome.finite), Cause(int(outcome.cause))) == (False, Cause.SPIKE)
    value, usual = (np.sqrt(2.0) * SPIKE, np.sqrt(2.0) * SLOPE) if of == "norm" else (50.0, 1.0)
    seen = [float(outcome.value), float(outcome.usual), float(outcome.limit)]
    np.testing.assert_allclose(seen, [value, usual, 3 * usual], rtol=1e-5)
    assert int(outcome.variable) == (0 if of == "norm" else -1)
    assert np.isnan(float(outcome.clipped_norm))
    assert line.moved() == before
    after = line.loss_scaler.state
    kept = [getattr(after, field).numpy() == getattr(state, field).numpy() for field in Dynamic().init()._fields]
    assert all(kept), kept
    attempted, applied, skipped, _ = counted
    assert list(map(int, line.loss_scaler.counters)) == [attempted + 1, applied, skipped + 1, 1]
    assert bool(line.step().finite)
    assert line.moved() != before
    assert int(line.loss_scaler.counters.consecutive_skips) == 0


@pytest.mark.slow_with("loop")
@modes("eager", "graph", "loop")
def test_a_spike_moves_nothing_and_the_next_step_is_applied(execute):
    line = warmed(shared(None) if execute is tf.function else Line(execute))
    holds_a_spike_back(line, "norm")
    holds_a_spike_back(line, "loss")


@pytest.mark.slow_with("True")
@pytest.mark.parametrize("xla", [False, True])
def test_steps_that_select_hold_alike(xla):
    line = warmed(Line(tf.function(jit_compile=True), select=True) if xla else shared(True))
    holds_a_spike_back(line, "norm")
    holds_a_spike_back(line, "loss")


def test_losses_that_are_scaled_together_are_watched():
    """`scale_loss` of a `LossScaleOptimizer` takes several losses, whose sum is differentiated."""
    weight = tf.Variable([1.0])
    guard = SpikeGuard(Dynamic(2.0**4), window=4, norm=False)
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(1.0), guard)
    optimizer.build([weight])

    def step(loss):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.stack([loss, loss]) + 2.0**-4 * tf.reduce_sum(weight))
        return optimizer.apply(tape.gradient(scaled, [weight]), [weight])

    assert all(bool(step(tf.constant(1.0)).finite) for _ in range(4))
    assert float(weight[0]) == 1.0 - 4 * 2 * 2.0**-4
    outcome = step(tf.constant(1000.0))
    assert (Cause(int(outcome.cause)), float(outcome.loss_scale)) == (Cause.SPIKE, 2.0**4)
    np.testing.assert_allclose([float(outcome.value), float(outcome.usual)], [2000.0, 2.0], rtol=0.1)


def test_the_largest_norm_skips_the_first_step_and_is_told_by_its_name():
    line = Line(lambda step: step, guarded(largest_norm=100.0))
    before = line.moved()
    outcome = line.step(SPIKE)
    assert (bool(outcome.finite), int(outcome.cause)) == (False, Cause.SPIKE)
    assert line.moved() == before
    assert float(line.loss_scaler.loss_scale) == 2.0**4
    assert float(outcome.limit) == 100.0
    assert np.isnan(outcome.usual)
    said = line.loss_scaler.explain()
    assert "above SpikeGuard's largest_norm, 100;" in said
    assert "raise largest_norm" in said
    assert bool(line.step().finite)
    for _ in range(3):
        line.step(SPIKE)
    with pytest.raises(StuckError, match="a larger factor or largest_norm"):
        line.loss_scaler.check()


@pytest.mark.parametrize("select", [None, True])
def test_an_overflow_is_no_spike_and_costs_the_scale(select):
    line = warmed(shared(select))
    outcome = line.step(1e6)
    assert Cause(int(outcome.cause)) == Cause.OVERFLOW
    assert float(outcome.value) == float(outcome.limit) == 0.0
    assert float(line.loss_scaler.loss_scale) < float(outcome.loss_scale)
    assert int(line.loss_scaler.state.spikes) == 0


def test_it_is_told_with_its_number_and_the_windows():
    line = warmed()
    outcome = line.step(SPIKE)
    said = line.loss_scaler.explain(outcome)
    assert said.startswith("The step was skipped because the global norm of its gradients is 707.107, above the limit")
    assert "of 8.48528 that SpikeGuard draws from a median of 2.82843" in said
    assert "the gradient of 'line" in said
    assert line.loss_scaler.explain() == said
    outcome = line.step(loss=50.0)
    assert "because its loss is 50, above the limit of 3 that SpikeGuard draws from a median of 1" in (
        line.loss_scaler.explain()
    )
    assert line.loss_scaler.explain() == line.loss_scaler.explain(outcome)


def test_another_level_is_stuck_and_has_lost_nothing():
    line = warmed()
    before = line.moved()
    for _ in range(2):
        line.step(SPIKE)
        line.loss_scaler.check()
    line.step(SPIKE)
    with pytest.raises(StuckError, match=r"3 steps in a row were skipped as spikes, and 2 are allowed.*median of 2.82"):
        line.loss_scaler.check()
    assert line.moved() == before
    line.step()
    line.loss_scaler.check()


def test_an_overflow_between_spikes_does_not_end_the_row():
    line = warmed(stuck=scaler.StuckPolicy("warn"))
    for slope in (SPIKE, SPIKE, float("inf"), SPIKE):
        line.step(slope)
    with pytest.warns(scaler.StuckWarning, match="3 steps in a row"):
        line.loss_scaler.check()


def test_a_checkpoint_holds_the_window_and_the_last_spike(tmp_path):
    word = [(SLOPE, 1.0)] * 4 + [(SPIKE, 1.0), (SLOPE, 1.2), (3.0, 1.0), (SLOPE, 60.0), (SPIKE, 1.0), (4.0, 1.0)]
    line = shared(None).reset()

    def run(steps):
        return [[np.asarray(value).tobytes() for value in line.step(*one)] for one in steps]

    expected, ends = run(word), [line.moved(), raw(line.loss_scaler.state)]
    line.reset()
    run(word[:5])
    limit = float(line.loss_scaler.last_skip.limit)
    parts = tf.train.Checkpoint(s=line.loss_scaler, o=line.optimizer, m=line.masters, v=[line.weight, line.moving])
    path = parts.write(str(tmp_path / "state"))
    run([(9.0, 3.0), (SPIKE, 1.0), (1.0, 90.0)])
    parts.read(path).assert_consumed()
    assert (line.loss_scaler.last_skip.cause, float(line.loss_scaler.last_skip.limit)) == (Cause.SPIKE, limit)
    assert run(word[5:]) == expected[5:]
    assert [line.moved(), raw(line.loss_scaler.state)] == ends


def test_windows_of_micro_batches_are_judged_whole():
    """`when` is False for the first of two: their losses add up, and only the whole is a spike."""
    weight, optimizer = tf.Variable([0.0]), keras.optimizers.SGD(1.0)
    optimizer.build([weight])
    loss_scaler = scaler.LossScaler(guarded(), select=False)

    @tf.function
    def take(loss, grad, when):
        with tf.GradientTape() as tape:
            own = tf.reduce_sum(weight) * grad
            scaled = loss_scaler.scale(own - tf.stop_gradient(own) + loss)
        grads = tape.gradient(scaled, [weight])
        return loss_scaler.apply(optimizer, grads, [weight], when=when)

    def window(first, second, grad=1.0):
        one = take(tf.constant(first), tf.constant(grad), tf.constant(False))
        assert (bool(one.finite), int(one.cause), float(one.value)) == (False, 0, 0.0)
        return take(tf.constant(second), tf.constant(grad), tf.constant(True))

    assert all(bool(window(0.5, 0.5).finite) for _ in range(5))
    assert bool(window(1.4, 1.4).finite)
    outcome = window(49.0, 1.0)
    assert (Cause(int(outcome.cause)), float(outcome.value)) == (Cause.SPIKE, 50.0)
    assert [int(one) for one in loss_scaler.counters] == [7, 6, 1, 1]


@pytest.mark.parametrize("execute", [tf.function, lambda step: step], ids=["graph", "eager"])
def test_a_loss_that_was_never_applied_is_not_judged(execute):
    weight, loss_scaler = tf.Variable(1.0), scaler.LossScaler(guarded())

    def step(loss, breaks):
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(weight - tf.stop_gradient(weight) + loss)
            tf.debugging.assert_equal(breaks, False)
        return loss_scaler.apply(scaler.move_nothing, [tape.gradient(scaled, weight)], [weight])

    step = execute(step)
    for _ in range(5):
        step(tf.constant(1.0), tf.constant(False))
    with contextlib.suppress(tf.errors.InvalidArgumentError):
        step(tf.constant(50.0), tf.constant(True))
    assert bool(step(tf.constant(1.0), tf.constant(False)).finite)


@pytest.mark.slow
def test_a_spike_is_not_retried_and_an_overflow_is():
    weight, optimizer = tf.Variable([0.0, 0.0]), keras.optimizers.SGD(2.0**-20)
    optimizer.build([weight])
    loss_scaler = scaler.LossScaler(SpikeGuard(Dynamic(2.0**15), window=5), select=False)

    def take(slope):
        with tf.GradientTape(persistent=True) as tape:
            line = tf.cast(tf.cast(weight, tf.float16) * tf.cast(slope, tf.float16), tf.float32)
            scaled = loss_scaler.scale(tf.reduce_sum(line))
        again = lambda small: tape.gradient(scaled, [weight], output_gradients=small)  # noqa: E731
        return loss_scaler.apply(optimizer, None, [weight], again=again)

    outcomes = [take(tf.constant(slope)) for slope in (3.0, 3.0, 3.0, 3.0, 8.0, 3000.0)]
    assert [bool(one.finite) for one in outcomes] == [True] * 5 + [False]
    assert [int(one.retries) for one in outcomes[:5]] == [1, 0, 0, 0, 2]
    spike = outcomes[5]
    # What overflowed was retried as ever, and the finite rest is the spike.
    assert (Cause(int(spike.cause)), int(spike.retries)) == (Cause.SPIKE, 8)


def test_an_optimizer_that_is_looked_at_keeps_its_promise():
    """Adagrad's update is looked at and taken back, where a spike does not even begin one."""
    weight, optimizer = tf.Variable([0.5]), keras.optimizers.Adagrad(0.1)
    optimizer.build([weight])
    loss_scaler = scaler.LossScaler(guarded())

    def step(slope):
        return take(loss_scaler, optimizer, lambda: tf.reduce_sum(weight * slope), [weight])

    assert all(bool(step(tf.constant(SLOPE)).finite) for _ in range(5))
    before = raw([weight], optimizer.variables)
    assert Cause(int(step(tf.constant(SPIKE)).cause)) is Cause.SPIKE
    assert raw([weight], optimizer.variables) == before


def test_the_long_form_asks_the_guard():
    loss_scaler = scaler.LossScaler(guarded())
    guard = loss_scaler.strategy

    def seen(norm):
        event = scaler.Event(tf.constant(True), norm=tf.constant(norm), loss=tf.constant(1.0))
        spike = bool(guard.is_spike(loss_scaler.state, event))
        loss_scaler.update(event)
        return spike

    assert [seen(norm) for norm in (1.0, 1.0, 1.0, 1.0, 99.0, 1.0)] == [False] * 4 + [True, False]
    assert [int(one) for one in loss_scaler.counters] == [6, 5, 1, 0]


def test_several_calls_of_one_step_are_refused():
    line = shared(None)
    with pytest.raises(scaler.InvalidArgument, match="SpikeGuard: the guard judges a whole step"):
        line.loss_scaler.apply(line.optimizer, [tf.constant([1.0, 1.0])], line.masters, update=False)


def test_without_a_guard_no_variable_is_added_and_the_outcome_has_no_numbers():
    line = warmed(Line(lambda step: step, strategy=Dynamic(2.0**4)))
    names = [variable.name for variable in line.loss_scaler.variables]
    assert not [name for name in names if "spike" in name or name == "loss:0"]
    outcome = line.step(SPIKE)
    assert (bool(outcome.finite), float(outcome.limit)) == (True, 0.0)
    assert scaler.authoring.spike_limits(line.loss_scaler) == {}
