"""Guards what is said of a skip: the cause for every combination of findings, and a sentence that names the tensor."""

import itertools

import keras
import pytest
import tensorflow as tf
from scaler_cases import by_hand
from ways import graph

import scaler
from scaler import Cause, Outcome
from scaler.outcome.outcome import LastSkip, Skip, int64, presumed_cause
from scaler.outcome.skip_sentence import explain

NAMES = ["kernel", "bias"]


def outcome(why, index=1, has_nan=False, **more):
    return Outcome(
        finite=tf.constant(why is Cause.NONE),
        loss_scale=tf.constant(2.0**15),
        grad_norm=tf.constant(float("nan")),
        cause=tf.constant(int(why)),
        has_nan=tf.constant(has_nan),
        index=tf.constant(index),
        clipped_norm=tf.constant(float("nan")),
        **more,
    )


def test_the_numbers_of_the_causes_are_those_in_old_checkpoints():
    names = ["NONE", "LOSS", "BACKWARD", "OVERFLOW", "TOO_LARGE", "UPDATE", "SPIKE"]
    assert [(why.name, int(why)) for why in Cause] == [(name, number) for number, name in enumerate(names)]


def test_the_presumed_cause_of_every_combination():
    for loss_finite, scaled_finite in itertools.product([False, True], repeat=2):
        got = presumed_cause(tf.constant(loss_finite), tf.constant(not scaled_finite))
        assert int(got) == (Cause.LOSS if not loss_finite else Cause.TOO_LARGE if scaled_finite else Cause.OVERFLOW)
        assert (got.dtype, got.shape) == (tf.float32, [])


LAYERS = ["a", "b", "c", "d"]
CAUSES = {
    f"{why.name}{', a NaN' * has_nan}": outcome(why, has_nan=has_nan)
    for why in (Cause.LOSS, Cause.BACKWARD, Cause.OVERFLOW, Cause.TOO_LARGE)
    for has_nan in (True, False)
}
PLACES = {
    "the first name": outcome(Cause.OVERFLOW, index=0),
    "a position without a name": outcome(Cause.OVERFLOW, index=4),
    "a gradient that is not known": outcome(Cause.OVERFLOW, index=-1),
    "one of four": outcome(Cause.BACKWARD, has_nan=True, count=1, nearest=1),
    "three of four, and the nearest to the loss": outcome(Cause.BACKWARD, has_nan=True, count=3, nearest=3),
    "the only one that is too large": outcome(Cause.TOO_LARGE, index=2, count=1, nearest=2),
    "two that are too large": outcome(Cause.TOO_LARGE, count=2, nearest=2),
    "a weight, and a lower scale that was seen to help": outcome(
        Cause.OVERFLOW, index=0, count=1, nearest=0, lower_helps=True
    ),
    "a weight and the loss": outcome(Cause.LOSS, index=0, has_nan=True, count=4, nearest=3),
    "a weight": outcome(Cause.OVERFLOW, index=0, has_nan=True, count=4, nearest=3),
    "a loss, and weights that were looked at": outcome(Cause.LOSS, count=1, nearest=1),
    "a replica": outcome(Cause.LOSS, index=0, replica=1),
    "a replica, and a weight that is the same on all": outcome(Cause.LOSS, index=0, replica=1),
    "a lower scale helps": outcome(Cause.OVERFLOW, lower_helps=True),
    "applied": outcome(Cause.NONE, index=-1),
    "not due": outcome(Cause.NONE, index=-1)._replace(finite=tf.constant(False)),
}


SPOILED = {
    "a weight, and a lower scale that was seen to help": "b",
    "a weight and the loss": "c",
    "a weight": "c",
    "a replica, and a weight that is the same on all": "b",
}
"""Which weight was not finite before the step."""


@pytest.mark.parametrize("told", [CAUSES, PLACES], ids=["causes", "places"])
def test_sentences(told, snapshot):
    said = {}
    for name, one in told.items():
        said[name] = explain(one, LAYERS, weight=SPOILED.get(name, "" if int(one.count) else None))
    assert said == snapshot


def test_a_norm_alone_does_not_tell_an_infinity_from_a_large_value(snapshot):
    assert explain(outcome(Cause.OVERFLOW, count=1, nearest=1), LAYERS, seen=False) == snapshot


@pytest.mark.parametrize("select", [False, True])
def test_weights_are_judged_only_as_they_were_at_the_skip(select):
    """Those of another optimizer count, too; after an applied step nothing is said of any."""
    tf.config.run_functions_eagerly(not select)  # Which branches.
    one, other = (tf.Variable([1.0, 2.0], name=name) for name in ("one", "other"))
    loss_scaler = scaler.LossScaler(scaler.Static(8.0), select=select)
    steps = {}
    for variable in (one, other):
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([variable])

        @graph
        def step(factor, optimizer=optimizer, variable=variable):
            with tf.GradientTape() as tape:
                scaled = loss_scaler.scale(tf.reduce_sum(one * one) * tf.reduce_sum(other) * factor)
            return loss_scaler.apply(optimizer, tape.gradient(scaled, [variable]), [variable]).finite

        steps[variable.name] = step
    fine, bad = tf.constant(1e-3), tf.constant(float("nan"))
    assert steps["one:0"](fine)
    assert not steps["other:0"](bad)
    assert "though all trained weights are" in loss_scaler.explain()
    good = one.numpy()
    one.assign([float("nan"), 1.0])
    assert not steps["other:0"](fine)
    assert "because the weight 'one:0' is already non-finite, and so is the loss" in loss_scaler.explain()
    one.assign(good)
    assert steps["other:0"](fine)
    assert "all trained weights" not in loss_scaler.explain()


def test_sentences_where_a_scale_cannot_go_lower(snapshot):
    """What forbids it is told by the scaler, and whether a lower one was seen to help by the outcome."""
    said = {}
    for strategy in (scaler.Dynamic(8.0), scaler.Dynamic(8.0, min_scale=8.0), scaler.Static(8.0), scaler.NoScaling()):
        loss_scaler = by_hand(strategy)
        loss_scaler.apply(lambda grads, variables: None, [tf.constant([float("inf")])], [tf.Variable([1.0])])
        said[str(strategy)] = loss_scaler.explain()
    for helps in (False, True):
        said[f"helps: {helps}"] = explain(outcome(Cause.OVERFLOW, lower_helps=helps), NAMES, "8 is the floor")
    assert said == snapshot


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


def test_the_variable_to_look_at_first():
    assert int(outcome(Cause.OVERFLOW, index=1).variable) == 1
    assert int(outcome(Cause.OVERFLOW, index=1, nearest=3).variable) == 3
    assert int(outcome(Cause.NONE, index=-1).variable) == -1


@pytest.mark.parametrize(
    ("given", "replica"),
    [
        ({}, -1),
        (dict(cause=3, has_nan=True, index=2, count=5, nearest=9, lower_helps=True), 0),
        (dict(cause=6, index=2**20 - 1, count=2**20, nearest=2**20 - 1), 500),
        (dict(cause=1, index=0, count=9, nearest=8), 14),
    ],
)
def test_the_last_skip_is_kept_as_it_is(given, replica):
    skip, last = Skip(**given), LastSkip()
    last.keep(tf.constant(2.0), skip.packed(), int64(replica), 2**16)
    kept = last.outcome({2**16: 2})
    assert Skip(*(getattr(kept, name).numpy().item() for name in Skip._fields)) == skip
    assert Skip(*(field.numpy().item() for field in Skip.of(skip.packed()))) == skip
    assert (float(kept.loss_scale), int(kept.replica), int(kept.name_offset)) == (2.0, replica, 2**16)


def test_positions_of_a_list_that_is_not_known_are_beyond_any():
    last = LastSkip()
    last.keep(tf.constant(2.0), Skip(cause=3, index=0, count=1, nearest=1).packed(), None, 2**16)
    kept = last.outcome()
    assert (int(kept.name_offset), int(kept.index), int(kept.nearest)) == (-1, 2**16, 2**16 + 1)


def test_sentences_before_any_step_and_any_skip(snapshot):
    weight, loss_scaler = tf.Variable([1.0]), scaler.LossScaler(scaler.Static(1.0))
    said = [loss_scaler.explain()]
    loss_scaler.apply(lambda grads, variables: None, [tf.constant([1.0])], [weight])
    said.append(loss_scaler.explain())
    loss_scaler.scale(tf.constant(1.0))
    loss_scaler.update(scaler.Event(tf.constant(False)))
    assert [*said, loss_scaler.explain()] == snapshot


def test_the_step_of_several_losses_is_not_told_of_its_own_scale(snapshot):
    weight = tf.Variable([1.0])
    losses = scaler.PerLoss({"task": scaler.Dynamic(0.5)})
    losses.scale({"task": tf.constant(1.0)})
    losses.apply(lambda grads, variables: None, {"task": [tf.constant([float("inf")])]}, [weight])
    assert losses.explain() == snapshot
