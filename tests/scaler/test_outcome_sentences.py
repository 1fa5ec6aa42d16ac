"""Guards what is said of a skip: the cause for every combination of findings, and a sentence that names the tensor."""

import itertools

import pytest
import tensorflow as tf
from scaler_cases import by_hand

import scaler
from scaler import Cause, Outcome
from scaler.outcome import explain, presumed_cause

NAMES = ["kernel", "bias"]


def outcome(why, index=1, has_nan=False):
    return Outcome(
        finite=tf.constant(why is Cause.NONE),
        loss_scale=tf.constant(2.0**15),
        grad_norm=tf.constant(float("nan")),
        cause=tf.constant(int(why)),
        has_nan=tf.constant(has_nan),
        index=tf.constant(index),
        clipped_norm=tf.constant(float("nan")),
    )


def test_the_numbers_of_the_causes_are_those_in_old_checkpoints():
    assert {why.name: int(why) for why in Cause} == {"NONE": 0, "LOSS": 1, "BACKWARD": 2, "OVERFLOW": 3, "TOO_LARGE": 4}


@pytest.mark.parametrize(("loss_finite", "scaled_finite"), list(itertools.product([False, True], [False, True])))
def test_the_presumed_cause_of_every_combination(loss_finite, scaled_finite):
    got = presumed_cause(tf.constant(loss_finite), tf.constant(scaled_finite))
    assert int(got) == (Cause.LOSS if not loss_finite else Cause.TOO_LARGE if scaled_finite else Cause.OVERFLOW)
    assert (got.dtype, got.shape) == (tf.int32, [])


SENTENCES = {
    Cause.LOSS: ["the loss itself was not finite", "'bias' is the first with", "No loss scale can help"],
    Cause.BACKWARD: ["at any loss scale", "'bias' is the first with", "square root"],
    Cause.OVERFLOW: ["overflowed at loss scale 32768;", "'bias' is the first with", "A lower scale helps"],
    Cause.TOO_LARGE: ["finite at loss scale 32768,", "'bias' is the largest", "No loss scale can help"],
}


@pytest.mark.parametrize("why", SENTENCES)
@pytest.mark.parametrize(("has_nan", "kind"), [(True, "a NaN"), (False, "an infinity")])
def test_a_skipped_step_is_told_with_its_cause_and_its_variable(why, has_nan, kind):
    said = explain(outcome(why, has_nan=has_nan), NAMES)
    assert said.startswith("The step was skipped because ")
    for part in SENTENCES[why]:
        assert part in said
    if why is not Cause.TOO_LARGE:
        assert f"is the first with {kind}" in said
    assert said.count(". ") <= 1
    assert said.endswith(".")


def test_an_applied_step_is_told_with_its_scale():
    assert explain(outcome(Cause.NONE, index=-1), NAMES) == "The step was applied at loss scale 32768."


@pytest.mark.parametrize(
    ("index", "name"), [(0, "'kernel'"), (1, "'bias'"), (2, "'number 2'"), (3, "'number 3'"), (-1, "'number -1'")]
)
def test_a_position_without_a_name_is_a_number(index, name):
    assert f"the gradient of {name} is" in explain(outcome(Cause.OVERFLOW, index=index), NAMES)


def test_the_scaler_knows_the_names_of_what_it_applied():
    weights = [tf.Variable([1.0], name=name) for name in NAMES]
    loss_scaler = by_hand(scaler.Static(4.0))
    got = loss_scaler.apply(lambda grads, variables: None, [None, tf.constant([float("inf")])], weights)
    said = "overflowed at loss scale 4; the gradient of 'bias:0' is the first with an infinity"
    assert said in loss_scaler.explain(got)
    assert loss_scaler.explain() == loss_scaler.explain(got)
    loss_scaler.apply(lambda grads, variables: None, [tf.constant([1.0]), None], weights)
    assert said in loss_scaler.explain()


def test_a_bad_loss_is_blamed_for_its_own_step_only():
    weight, bad = tf.Variable([1.0]), tf.constant([float("inf")])
    loss_scaler = by_hand(scaler.Static(4.0))

    def step(loss, grad):
        loss_scaler.scale(tf.constant(loss))
        return int(loss_scaler.apply(lambda grads, variables: None, [grad], [weight]).cause)

    assert step(float("nan"), bad) == Cause.LOSS
    assert step(1.0, bad) == Cause.OVERFLOW
    assert step(1.0, tf.constant([1.0])) == Cause.NONE
    assert step(float("inf"), bad) == Cause.LOSS
