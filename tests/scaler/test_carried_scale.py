"""Guards that gradients are unscaled by the scale of their own loss, whatever was scaled or applied between."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from carried_cases import Two
from mirrored import mirrored
from scaler_cases import modes, modes_with
from ways import graph

import scaler


@modes_with(["between"], eager=[["update"], ["apply"]], graph=[["update"]])
def test_a_gradient_waits_while_the_scale_moves_and_another_loss_is_scaled(execute, between):
    two = Two()

    def step():
        first = two.gradients(0)
        two.moves(between)
        second = two.gradients(1)
        one, other = two.apply(0, first), two.apply(1, second)
        return one.loss_scale, other.loss_scale

    run = execute(step)
    assert [float(scale) for scale in run()] == [2.0**10, 2.0**11]
    run()
    assert two.moved() == [2.0, 2.0 if between == "update" else 4.0]


@modes("eager", "graph")
def test_it_waits_for_unscale(execute):
    two = Two()

    def step():
        first = two.gradients(0)
        two.moves("update")
        second = two.gradients(1)
        return [grad for grads in (first, second) for grad in two.loss_scaler.unscale(grads)]

    assert [float(grad[0]) for grad in execute(step)()] == [-1.0, -1.0]


@pytest.mark.slow_with("False")
@pytest.mark.parametrize("eager", [False, True])
def test_a_loss_is_differentiated_after_another_was_scaled(eager):
    two = Two()

    def step():
        with tf.GradientTape() as tape:
            scaled = two.loss_scaler.scale(-tf.reduce_sum(two.weights[0]))
        two.moves("update")
        second = two.gradients(1)
        two.apply(1, second)
        return two.apply(0, tape.gradient(scaled, [two.weights[0]])).loss_scale

    assert float(step() if eager else graph(step)()) == 2.0**10
    assert two.moved() == [1.0, 1.0]


@pytest.mark.parametrize("between", ["update", "apply"])
def test_a_changed_gradient_is_refused_in_eager_mode(between):
    two = Two()
    first = two.gradients(0)
    two.moves(between)
    two.gradients(1)
    with pytest.raises(scaler.InvalidArgument, match=r"may carry a scale of 1024 or 2048.*unscaled=True"):
        two.apply(0, [first[0] * 1.0])
    assert two.moved()[0] == 0.0


@modes("eager", "graph")
def test_gradients_of_two_scales_in_one_list_are_refused(execute):
    two = Two()

    def step():
        first = two.gradients(0)
        two.moves("update")
        two.loss_scaler.apply(keras.optimizers.SGD(1.0), [*first, *two.gradients(1)], two.weights)

    with pytest.raises(scaler.InvalidArgument, match=r"the loss scale moved between|may carry a scale of"):
        execute(step)()
    assert two.moved() == [0.0, 0.0]


@pytest.mark.parametrize("between", ["update", "apply"])
def test_a_gradient_that_a_variable_kept_for_a_step_is_refused(between):
    two, kept = Two(), tf.Variable([0.0], name="kept")

    @graph
    def step():
        two.moves(between)
        first = two.gradients(0)
        two.apply(0, [kept.read_value()])
        kept.assign(first[0])

    with pytest.raises(scaler.InvalidArgument, match=r"kept in the variable 'kept:0'.*unscaled=True"):
        step()


@modes("eager", "graph")
def test_a_gradient_is_kept_unscaled(execute):
    two, kept = Two(), tf.Variable([0.0])

    def step():
        (first,) = two.loss_scaler.unscale(two.gradients(0))
        outcome = two.apply(0, [kept.read_value()], unscaled=True)
        kept.assign(first)
        return outcome.finite

    run = execute(step)
    for _ in range(4):
        run()
    assert two.moved()[0] == 3.0


@modes("eager", "graph")
def test_a_gradient_is_kept_with_its_scale(execute):
    two, kept, scale = Two(), tf.Variable([0.0]), tf.Variable(1.0)

    def step():
        first = two.gradients(0)
        now = two.loss_scaler.scale_of_gradients
        outcome = two.apply(0, [kept.read_value()], loss_scale=scale.read_value())
        kept.assign(first[0])
        scale.assign(now)
        return outcome.loss_scale

    run = execute(step)
    assert [float(run()) for _ in range(4)] == [1.0, 2.0**10, 2.0**11, 2.0**12]
    assert two.moved()[0] == 3.0


@pytest.mark.parametrize("scale", [[1.0, 2.0], "2", 3, tf.constant(2), np.ones(2, np.float32)])
def test_a_scale_that_is_none_is_refused(scale):
    two = Two()
    with pytest.raises(scaler.InvalidArgument, match=r"apply: loss_scale=.*expected a scalar"):
        two.apply(0, two.gradients(0), loss_scale=scale)


@modes("eager", "graph")
def test_a_variable_that_this_step_filled_carries_its_scale(execute):
    two, kept = Two(), tf.Variable([0.0])

    def step():
        kept.assign(two.gradients(0)[0])
        two.moves("update")
        return two.apply(0, [kept.read_value()]).loss_scale

    run = execute(step)
    assert [float(run()) for _ in range(2)] == [2.0**10, 2.0**12]
    assert two.moved()[0] == 2.0


def test_micro_batches_of_a_loop_in_the_graph():
    two = Two()

    @tf.function
    def step():
        total = tf.zeros([1])
        for _ in tf.range(4):
            total += two.gradients(0, weight=0.25)[0]
        two.apply(0, [total])

    step()
    step()
    assert two.moved()[0] == 2.0


def test_a_loop_that_scales_at_several_scales_is_refused():
    two = Two()

    @tf.function
    def step():
        total = tf.zeros([1])
        for _ in tf.range(2):
            total += two.gradients(0)[0]
            two.moves("update")
        two.apply(0, [total])

    with pytest.raises(scaler.InvalidArgument, match="inside of a function or a loop"):
        step()


@pytest.mark.slow_with("False")
@pytest.mark.parametrize("is_refused", [False, True])
def test_gradients_that_a_function_returns(is_refused):
    two = Two()
    of_first, of_second = (graph(lambda which=which: two.gradients(which)) for which in range(2))

    @graph
    def step():
        first, second = of_first(), of_second()
        if is_refused:
            two.moves("update")
            of_second()
        two.apply(0, first)
        two.apply(1, second)

    if is_refused:
        with pytest.raises(scaler.InvalidArgument, match="nothing here remembers which scale"):
            step()
    else:
        step()
        step()
    assert two.moved() == ([0.0, 0.0] if is_refused else [2.0, 2.0])


@modes("graph")
def test_one_scaler_for_two_networks_in_turn(execute):
    """As a GAN has them: the gradients of each are applied before the loss of the other is scaled."""
    two = Two()

    def step():
        for which in range(2):
            grads = two.gradients(which)
            two.apply(which, [grad * 1.0 for grad in grads])

    run = execute(step)
    for _ in range(5):
        run()
    assert two.moved() == [5.0, 5.0]


@modes("eager")
def test_one_gradient_for_two_optimizers(execute):
    two = Two()

    def step():
        grads = two.gradients(0)
        two.apply(0, grads)
        two.gradients(1)
        return two.apply(1, grads).loss_scale

    assert float(execute(step)()) == 2.0**10
    assert two.moved() == [1.0, 1.0]


def test_a_batch_that_is_given_up_is_forgotten():
    """In eager mode an `update` that tells of a bad step ends its losses."""
    two = Two()
    two.gradients(0)
    two.loss_scaler.update(scaler.Event(tf.constant(False)))
    two.apply(0, [two.gradients(0)[0] * 1.0])
    assert two.moved() == [1.0, 0.0]


def test_steps_in_eager_mode_after_steps_in_a_graph():
    two = Two()

    def step():
        two.apply(0, two.gradients(0))

    step()
    graph(step)()
    of_graph = graph(lambda: two.gradients(0))()
    two.apply(0, of_graph)
    step()
    assert two.moved()[0] == 4.0


@modes_with(["strategy"], eager=[[scaler.NoScaling()], [scaler.Static(2.0**7)]])
def test_a_scale_that_cannot_move_is_never_refused(execute, strategy):
    two, kept, of_both = Two(strategy), tf.Variable([0.0]), keras.optimizers.SGD(1.0)
    of_both.build(two.weights)

    def step():
        first = two.gradients(0)
        two.moves("update")
        two.loss_scaler.apply(of_both, [*first, *two.gradients(1)], two.weights)
        two.apply(0, [kept.read_value()])
        kept.assign(first[0] * 1.0)
        return first[0]

    run = execute(step)
    run()
    run()
    assert two.moved() == [3.0, 2.0]


@modes("eager")
def test_the_loss_of_another_gradient_is_not_to_blame(execute):
    two = Two()

    def step(weight):
        first = two.gradients(0, weight)
        two.moves("update")
        two.loss_scaler.scale(tf.constant(np.inf))
        return two.apply(0, first).cause

    # The product with the scale is beyond float32, the loss is not.
    two.weights[0].assign([1.0])
    assert int(execute(step)(np.float32(1e36))) == scaler.Cause.OVERFLOW


def test_on_two_replicas():
    strategy = mirrored(2)
    with strategy.scope():
        two = Two()

    @graph
    def step():
        def replica():
            first = two.gradients(0, weight=0.5)
            two.moves("update")
            second = two.gradients(1, weight=0.5)
            two.apply(0, first)
            return two.loss_scaler.unscale(second)[0]

        return strategy.experimental_local_results(strategy.run(replica))

    assert [[float(grad[0]) for grad in step()] for _ in range(2)] == [[-0.5, -0.5]] * 2
    assert two.moved()[0] == 2.0
