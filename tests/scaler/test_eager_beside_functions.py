"""Guards that eager mode knows the scale of a gradient while functions scale losses, too, and after many steps."""

import copy

import pytest
import tensorflow as tf
from carried_cases import GROWS, Two

import scaler


@pytest.mark.parametrize("functions", [[], ["first", "other_step"]])
def test_two_steps_of_another_model_come_between(functions):
    two = Two(functions=functions)
    for _ in range(3):
        grad = two.first()
        two.other_step()
        two.other_step()
        two.apply(0, grad)
    assert two.moved() == [3.0, 6.0]


@pytest.mark.parametrize("functions", [["first"], ["first", "second"]])
def test_a_changed_gradient_is_refused_where_it_may_come_from_two_losses(functions):
    two = Two(functions=functions)
    grad = two.first()
    two.loss_scaler.update(scaler.Event(tf.constant(True)))
    two.second()
    with pytest.raises(scaler.InvalidArgument, match="may carry a scale of 1024 or 2048"):
        two.apply(0, [grad[0] * 1.0])
    assert two.moved() == [0.0, 0.0]


@pytest.mark.parametrize("functions", [["first"], ["other_step"]])
def test_two_models_in_turn(functions):
    """With micro-batches of the first, whose gradients are summed in eager mode."""
    two = Two(functions=functions)
    for _ in range(3):
        two.apply(0, two.first() if functions == ["other_step"] else [two.first()[0] / 2.0 + two.first()[0] / 2.0])
        two.other_step()
    assert two.moved() == [3.0, 3.0]


def test_one_function_of_several_gradients():
    two = Two()
    both = tf.function(lambda: [two.gradients(0), two.gradients(1)])
    for _ in range(3):
        for which, grad in enumerate(both()):
            two.apply(which, grad)
    assert two.moved() == [3.0, 3.0]


def test_a_function_within_a_function():
    two = Two(functions=["first"])
    outer = tf.function(lambda: [two.first()[0] * 1.0])
    two.first()
    grad = outer()
    two.other_step()
    two.other_step()
    two.apply(0, grad)
    assert two.moved() == [1.0, 2.0]


def test_gradients_that_another_function_takes_do_not_wait():
    two = Two(functions=["first"])
    taken = tf.function(lambda grad: two.apply(0, grad))
    for _ in range(3):
        taken(two.first())
    two.other_step()
    assert two.moved() == [3.0, 1.0]


def test_a_gradient_waits_for_many_steps():
    two = Two(scaler.Dynamic(2.0**10, growth_interval=2))
    grad = two.first()
    for _ in range(33):
        two.other_step()
    assert float(two.apply(0, grad).loss_scale) == 2.0**10
    assert two.moved() == [1.0, 33.0]


def test_more_waiting_losses_than_are_remembered_leave_the_scale_unknown():
    two = Two(scaler.Dynamic(2.0**10, growth_interval=1, growth_factor=1.125))
    kept = []
    for _ in range(34):
        kept.append(two.first())
        two.loss_scaler.update(scaler.Event(tf.constant(True)))
    with pytest.raises(scaler.InvalidArgument, match="may carry a scale of"):
        two.apply(0, kept[0])
    with pytest.raises(scaler.InvalidArgument, match="may carry a scale of"):
        two.apply(0, kept[-1])
    assert two.moved() == [0.0, 0.0]


def test_a_copy_starts_anew():
    two = Two(functions=["other_step"])
    two.other_step()
    copied = copy.deepcopy(two.loss_scaler)
    two.loss_scaler = copied
    two.apply(0, two.first())
    assert two.moved() == [1.0, 1.0]


@pytest.mark.parametrize("strategy", [scaler.Static(2.0**7), scaler.NoScaling()])
def test_a_scale_that_never_moves_needs_no_look(strategy):
    looks = [
        len(tf.function(Two(one).first).get_concrete_function().graph.deferred_internal_captures)
        for one in (strategy, GROWS)
    ]
    assert looks == [0, 1]
