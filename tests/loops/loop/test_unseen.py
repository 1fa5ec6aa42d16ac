"""A step that was applied though its loss is not finite is named once, at the visit; a skipped one is not."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from loop_cases import batch, line

import loops
import scaler
from loops.loop.silence import of_applied

FAR = 300.0
"""A target whose square float16 does not hold; the derivative of that square it does."""


def squares(y, prediction):
    """Infinite in float16, with a finite gradient, as of a loss that nobody casts in time."""
    return tf.cast(tf.reduce_mean(tf.square(tf.cast(y, tf.float16) - tf.cast(prediction, tf.float16))), tf.float32)


def data(far, steps=12):
    """Batches without an end; those with a number in `far` (from 1) have far targets."""
    batches = [batch(number) for number in range(1, steps + 1)]
    batches = [(x, y + FAR * (number in far)) for number, (x, y) in enumerate(batches, 1)]
    return tf.data.Dataset.from_tensor_slices(tuple(tf.stack(part) for part in zip(*batches, strict=True))).repeat()


def train_step(strategy, **options):
    return loops.TrainStep(
        line(), squares, keras.optimizers.SGD(1e-6), loss_scaler=scaler.LossScaler(strategy), **options
    )


def said(step, far, steps_per_call=4, steps=12):
    """The warnings of a run about a loss that cannot be seen."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop = loops.Loop(step, data(far, steps), steps_per_call=steps_per_call)
        loop.run(steps)
    return [str(one.message) for one in caught if "loss is not finite" in str(one.message)]


def test_the_first_applied_step_is_named_once():
    (message,) = said(train_step(scaler.Static(64.0)), [6, 7], 1, 7)
    assert message.startswith("Step 6 was applied though its loss is not finite.")
    assert "Compute the loss in float32" in message


def test_of_the_outputs_of_a_composed_step_the_part_is_named():
    """A turn that is left out has a loss of NaN, which is none that was computed."""
    taken = tf.Variable(0)

    def step(x, y):
        turn = tf.equal(taken.assign_add(1) % 2, 0)
        loss = tf.where(turn, tf.where(tf.equal(taken, 6), np.inf, 1.0), np.nan)
        return {"near/loss": 1.0, "near/applied": True, "far/loss": loss, "far/attempted": turn, "far/applied": turn}

    step.scalers = {name: scaler.LossScaler(scaler.Static(64.0)) for name in ("near", "far")}
    (message,) = said(step, [], steps_per_call=12)
    assert message.startswith("Step 6 of part 'far' was applied though its loss is not finite.")


class OwnStep(tf.Module):
    """A step of one's own that names its outputs as a composed step does, and keeps its scalers in a list."""

    def __init__(self, count):
        super().__init__()
        self.scalers = [scaler.LossScaler(scaler.Static(64.0)) for _ in range(count)]
        self.weight = tf.Variable(1.0)

    def __call__(self, element):
        loss = tf.reduce_mean(self.weight * element[0]) + np.inf
        for one in self.scalers:
            outcome = one.apply(scaler.move_nothing, [tf.constant(64.0)], [self.weight])
        return {"tower/loss": loss, "tower/applied": outcome.finite, "extra/loss": loss, "deep/er/loss": loss}


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize(("count", "known"), [(1, 1), (2, 0)])
def test_outputs_of_ones_own_step_may_have_such_names(count, known):
    """With one scaler it is known whose loss it is. Those that only end in "/loss" are not looked at."""
    found = said(OwnStep(count), [], 1, 2)
    assert len(found) == known
    assert all(message.startswith("Step 1 of part 'tower' was applied") for message in found)


@pytest.mark.slow
def test_the_losses_of_a_window_that_is_applied():
    (message,) = said(train_step(scaler.Static(64.0), accumulate=3), [5], 1)
    assert message.startswith("Step 5 was applied")
    # Its third micro-batch is not finite, and takes the others with it.
    assert said(train_step(scaler.Static(2.0**12), accumulate=3), [5], 1) == []


class ByHand:
    """A step of the user's own, which returns what is asked for."""

    def __init__(self, returns, strategy):
        self.model = line()
        self.loss_scaler = scaler.LossScaler(strategy)
        self.returns = returns

    def __call__(self, x, y):
        with tf.GradientTape() as tape:
            loss = squares(y, self.model(x, training=True))
            scaled = self.loss_scaler.scale(loss)
        weights = self.model.trainable_variables
        outcome = self.loss_scaler.apply(scaler.move_nothing, tape.gradient(scaled, weights), weights)
        outputs = {"loss": loss, "error": loss, "applied": outcome.finite, "norm": outcome.grad_norm}
        return {name: outputs[name] for name in self.returns}


@pytest.mark.usefixtures("eagerly")
def test_a_step_by_hand_that_returns_its_loss():
    """Both losses are infinite; the first overflows at its scale, and is skipped."""
    (message,) = said(ByHand(("loss", "applied"), scaler.Dynamic(2.0**10, sees_every_step=True)), [3, 6], 1, 7)
    assert message.startswith("Step 6 was applied")


@pytest.mark.exhaustive
def test_of_a_loss_that_is_not_returned_the_scaler_knows_that_of_the_last_step():
    (message,) = said(ByHand(("norm",), scaler.Static(64.0)), range(1, 13))
    assert message.startswith("The last of 4 attempted steps was applied")
    assert said(ByHand(("error",), scaler.Static(64.0)), [6]) == []
    assert said(ByHand(("norm",), scaler.Static(2.0**12)), [4, 8, 12]) == []


def test_a_batch_moves_the_weights_with_its_window():
    attempted = np.array([False, True, False, True, False])
    found = of_applied(attempted, np.array([False, True, False, False, False]))
    assert found.tolist() == [True, True, False, False, False]
