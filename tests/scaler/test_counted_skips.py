"""Guards what is said of a skip that `update` counted: the reason that its own step found, and never an older one."""

import keras
import pytest
import tensorflow as tf
from mirrored import mirrored
from scaler_cases import modes

import scaler
from scaler import Cause, Event

ONE, NAN, LARGE = map(tf.constant, (1.0, float("nan"), 1e4))
SAYS_NOTHING = "the last through `update`, which does not know why"


class Two:
    """Two weights, each with its optimizer, and one scaler at 2^15, where a slope of 1e4 overflows."""

    def __init__(self):
        self.weights = [tf.Variable([1.0], name=name) for name in "ab"]
        self.loss_scaler = scaler.LossScaler(scaler.Static(2.0**15), stuck=scaler.StuckPolicy(consecutive_skips=3))
        self.optimizers = [keras.optimizers.SGD(2.0**-20) for _ in self.weights]
        for optimizer, weight in zip(self.optimizers, self.weights, strict=True):
            optimizer.build([weight])

    def gradients(self, *slopes):
        with tf.GradientTape() as tape:
            halves = tf.cast(tf.stack(self.weights), tf.float16) * tf.cast(tf.stack(slopes), tf.float16)[:, tf.newaxis]
            scaled = self.loss_scaler.scale(tf.reduce_sum(tf.cast(halves, tf.float32)))
        return tape.gradient(scaled, self.weights)

    def together(self, *slopes):
        """A step of one optimizer for both, which knows why it skips."""
        return self.loss_scaler.apply(scaler.move_nothing, self.gradients(*slopes), self.weights).finite

    def long_form(self, *slopes):
        """A step that leaves the scaler nothing but a bool."""
        finite = scaler.all_finite(self.loss_scaler.unscale(self.gradients(*slopes)))
        self.loss_scaler.update(Event(finite))
        return finite

    def judged(self, *slopes):
        """The recipe of docs/composed_step.md: all gradients are judged, and each optimizer takes its part."""
        grads = self.gradients(*slopes)
        verdict = self.loss_scaler.apply(scaler.move_nothing, grads, self.weights, update=False).finite
        moved = [verdict]
        for optimizer, weight, grad in zip(self.optimizers, self.weights, grads, strict=True):
            moved.append(self.loss_scaler.apply(optimizer, [grad], [weight], update=False, when=verdict).finite)
        self.loss_scaler.update(Event(tf.reduce_all(moved)))
        return verdict


@pytest.mark.slow_with("xla")
@modes("eager", "graph", "xla")
def test_a_skip_that_update_counted_is_not_explained_by_an_older_one(execute):
    two = Two()
    assert not two.together(NAN, ONE)
    assert "'a:0'" in two.loss_scaler.explain()
    step = execute(two.long_form)
    assert step(ONE, ONE)
    assert "'a:0'" in two.loss_scaler.explain()
    for _ in range(3):
        assert not step(ONE, LARGE)
    assert two.loss_scaler.explain().startswith(f"4 of 5 steps were skipped, {SAYS_NOTHING}")
    assert int(two.loss_scaler.last_skip.cause) == Cause.NONE
    with pytest.raises(scaler.StuckError, match=f"3 steps in a row were skipped, .*{SAYS_NOTHING}"):
        two.loss_scaler.check()


@modes("eager", "graph")
def test_a_skip_that_an_apply_judged_and_update_counted_is_explained(execute):
    two = Two()
    step = execute(two.judged)
    assert step(ONE, ONE)
    assert [float(weight[0]) for weight in two.weights] == [1.0 - 2.0**-20] * 2
    for _ in range(3):
        assert not step(ONE, LARGE)
    assert [float(weight[0]) for weight in two.weights] == [1.0 - 2.0**-20] * 2
    last = two.loss_scaler.last_skip
    assert (int(last.cause), float(last.loss_scale)) == (Cause.OVERFLOW, 2.0**15)
    with pytest.raises(scaler.StuckError, match="overflowed at loss scale 32768; the gradient of 'b:0' is the first"):
        two.loss_scaler.check()


def test_a_reason_serves_one_step():
    two = Two()
    assert not two.judged(ONE, LARGE)
    assert two.judged(ONE, ONE)
    assert "'b:0'" in two.loss_scaler.explain()
    assert not two.long_form(ONE, LARGE)
    assert SAYS_NOTHING in two.loss_scaler.explain()


def test_a_step_that_was_never_counted_gives_no_reason_to_a_later_one():
    """The user passes over a bad batch without `update`, and skips a finite step for reasons of their own."""
    two = Two()

    @tf.function
    def step(slope, wanted):
        grads = two.gradients(slope, ONE)
        verdict = two.loss_scaler.apply(scaler.move_nothing, grads, two.weights, update=False)

        def counted():
            two.loss_scaler.update(Event(verdict.finite & wanted))
            return True

        return tf.cond(tf.math.is_finite(slope), counted, lambda: False)

    assert not step(NAN, tf.constant(True))
    assert step(ONE, tf.constant(False))
    assert SAYS_NOTHING in two.loss_scaler.explain()
    assert step(LARGE, tf.constant(True))
    assert "overflowed at loss scale 32768" in two.loss_scaler.explain()


def test_the_reason_of_a_part_that_skipped_alone_stays():
    """The user counts the step as applied, or as skipped, after one of two `apply` skipped."""
    for counted in (True, False):
        two = Two()
        for weight, optimizer, grad in zip(two.weights, two.optimizers, two.gradients(NAN, ONE), strict=True):
            two.loss_scaler.apply(optimizer, [grad], [weight], update=False)
        two.loss_scaler.update(Event(tf.constant(counted)))
        last = two.loss_scaler.last_skip
        assert (int(last.cause), float(last.loss_scale)) == (Cause.LOSS, 2.0**15)
        assert "'a:0'" in two.loss_scaler.explain()


def test_replicas_keep_the_reason_together():
    strategy = mirrored(2)
    with strategy.scope():
        two = Two()
        skip = two.loss_scaler.last_skip._replace(cause=tf.constant(2, tf.int64))
        two.loss_scaler._kept.keep_where(tf.constant(True), skip)
    tf.function(lambda: strategy.run(two.long_form, (ONE, LARGE)))()
    last = two.loss_scaler.last_skip
    assert (int(last.cause), float(last.loss_scale)) == (Cause.NONE, 0.0)
    first, second = strategy.experimental_local_results(two.loss_scaler._kept.variable)
    assert first.numpy().tolist() == second.numpy().tolist()
