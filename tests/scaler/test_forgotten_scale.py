"""Guards that a step whose loss nobody scaled, or that is counted twice, is not taken in silence."""

import warnings

import keras
import pytest
import tensorflow as tf
from scaler_cases import modes

import scaler

GRADS = [tf.constant([1.0])]


def variables():
    return [tf.Variable([0.0])]


@modes("eager", "graph")
def test_apply_without_scale_warns_once(execute):
    loss_scaler, targets = scaler.LossScaler(), variables()
    run = execute(lambda: loss_scaler.apply(scaler.move_nothing, GRADS, targets).finite)
    with pytest.warns(scaler.ScaleWarning, match=r"neither scale\(loss\)") as seen:
        run()
    assert len(seen) == 1
    run()


@pytest.mark.parametrize("strategy", [scaler.Dynamic(1.0), scaler.Static(2.0), scaler.presets.pytorch()])
def test_any_strategy_that_scales(strategy):
    with pytest.warns(scaler.ScaleWarning, match=r"Differentiate scale\(loss\)"):
        scaler.LossScaler(strategy).apply(scaler.move_nothing, GRADS, variables())


def test_a_scale_of_one_needs_nothing():
    for strategy in (scaler.NoScaling(), scaler.Static(1.0)):
        scaler.LossScaler(strategy).apply(scaler.move_nothing, GRADS, variables())


@pytest.mark.slow
def test_the_optimizer_and_several_losses_too():
    variable = keras.Variable([0.0])
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    with pytest.warns(scaler.ScaleWarning, match=r"scale_loss"):
        tf.function(lambda: optimizer.apply(GRADS, [variable]).finite)()
    losses = scaler.PerLoss({"a": scaler.NoScaling(), "b": scaler.Dynamic()})
    with pytest.warns(scaler.ScaleWarning, match=r"neither scale\(loss\)"):
        losses.apply(scaler.move_nothing, {"a": GRADS, "b": GRADS}, variables())


def test_whoever_asked_for_the_scale_knows():
    def read(loss_scaler):
        return [grad * loss_scaler.loss_scale for grad in GRADS]

    def read_state(loss_scaler):
        return [grad * loss_scaler.state.loss_scale for grad in GRADS]

    def scale(loss_scaler):
        return [loss_scaler.scale(tf.constant(1.0))[tf.newaxis]]

    def unscale(loss_scaler):
        return loss_scaler.unscale(read(loss_scaler))

    for how in (read, read_state, scale):
        loss_scaler = scaler.LossScaler()
        assert loss_scaler.apply(scaler.move_nothing, how(loss_scaler), variables()).finite
    loss_scaler = scaler.LossScaler()
    assert loss_scaler.apply(scaler.move_nothing, unscale(loss_scaler), variables(), unscaled=True).finite
    assert scaler.LossScaler().apply(scaler.move_nothing, GRADS, variables(), unscaled=True).finite


@modes("eager", "graph")
def test_a_step_that_is_counted_twice_is_noticed(execute):
    loss_scaler, targets = scaler.LossScaler(scaler.Dynamic(8.0)), variables()

    def step():
        grads = [loss_scaler.scale(tf.constant(1.0))[tf.newaxis]]
        outcome = loss_scaler.apply(scaler.move_nothing, grads, targets)
        loss_scaler.update(scaler.Event(outcome.finite))
        return outcome.finite

    with pytest.warns(scaler.ScaleWarning, match="moves the scale twice"):
        execute(step)()


@modes("eager", "loop")
def test_two_updates_in_a_row_are_noticed(execute):
    loss_scaler = scaler.LossScaler(scaler.Dynamic(8.0))

    def step():
        (grad,) = loss_scaler.unscale([loss_scaler.scale(tf.constant(1.0))[tf.newaxis]])
        for _ in range(2):
            loss_scaler.update(scaler.Event(scaler.all_finite([grad])))
        return grad

    with pytest.warns(scaler.ScaleWarning, match="moves the scale twice"):
        execute(step)()


@pytest.mark.slow_with("graph")
@modes("eager", "graph")
def test_one_update_for_a_step_is_none(execute):
    loss_scaler, targets = scaler.LossScaler(scaler.Dynamic(8.0)), variables()

    def scaled():
        return [loss_scaler.scale(tf.constant(1.0))[tf.newaxis]]

    def step():
        """Three steps, each with another end: a count after two parts, the long form and `apply`."""
        outcomes = [loss_scaler.apply(scaler.move_nothing, scaled(), targets, update=False) for _ in range(2)]
        loss_scaler.update(scaler.Event(outcomes[0].finite & outcomes[1].finite))
        finite = scaler.all_finite(loss_scaler.unscale(scaled()))
        loss_scaler.update(scaler.Event(finite))
        loss_scaler.apply(scaler.move_nothing, scaled(), targets)
        return finite

    run = execute(step)
    run()
    run()


def test_a_scaler_under_study_is_only_driven():
    driven = scaler.LossScaler(scaler.Dynamic(8.0))
    for finite in (True, False, True):
        driven.update(scaler.Event(tf.constant(finite)))
        assert driven.loss_scale > 0.0
    tf.function(lambda: [driven.update(scaler.Event(tf.constant(True))) for _ in range(2)] and tf.constant(0))()


def test_a_step_in_a_function_and_its_update_outside():
    loss_scaler, targets = scaler.LossScaler(scaler.Dynamic(8.0, growth_interval=1)), variables()

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(targets[0][0])
        return loss_scaler.unscale([tape.gradient(scaled, targets[0])])[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            assert step().numpy() == [1.0]
            loss_scaler.update(scaler.Event(tf.constant(True)))
            assert loss_scaler.loss_scale.numpy() == 8.0 * 2 ** (number + 1)
