"""Guards what is said of a skip: the cause for every combination of findings, and a sentence that names the tensor."""

import itertools

import pytest
import tensorflow as tf
from scaler_cases import by_hand

import scaler
from scaler import Cause, Outcome
from scaler.outcome.last_skip import MOST_COUNTED, LastSkip, packed, unpacked
from scaler.outcome.outcome import Skip, not_skipped, presumed_cause, whole
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
    assert {why.name: int(why) for why in Cause} == {
        "NONE": 0,
        "LOSS": 1,
        "BACKWARD": 2,
        "OVERFLOW": 3,
        "TOO_LARGE": 4,
        "UPDATE": 5,
        "SPIKE": 6,
    }


@pytest.mark.parametrize(("loss_finite", "scaled_finite"), list(itertools.product([False, True], [False, True])))
def test_the_presumed_cause_of_every_combination(loss_finite, scaled_finite):
    got = presumed_cause(tf.constant(loss_finite), tf.constant(scaled_finite))
    assert int(got) == (Cause.LOSS if not loss_finite else Cause.TOO_LARGE if scaled_finite else Cause.OVERFLOW)
    assert (got.dtype, got.shape) == (tf.int64, [])


SENTENCES = {
    Cause.LOSS: ["the loss itself was not finite", "'bias' is the first with", "No loss scale makes it finite"],
    Cause.BACKWARD: ["no loss scale that was tried", "'bias' is the first with", "square root"],
    Cause.OVERFLOW: ["overflowed at loss scale 32768;", "'bias' is the first with", "A lower scale may help; if"],
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


@pytest.mark.parametrize(("index", "name"), [(0, "'kernel'"), (1, "'bias'"), (2, "'number 2'"), (3, "'number 3'")])
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


LAYERS = ["a", "b", "c", "d"]
WORDS = {
    "one": (dict(index=1, count=1, nearest=1), "the gradient of 'b' is the first with a NaN, and the only one."),
    "three": (
        dict(index=1, count=3, nearest=3),
        "the gradient of 'b' is the first of 3 that are non-finite, with a NaN among them, and that of 'd' the last, "
        "usually the nearest to the loss.",
    ),
    "from an old checkpoint": (dict(index=1), "the gradient of 'b' is the first with a NaN."),
}


@pytest.mark.parametrize(("more", "said"), WORDS.values(), ids=WORDS)
def test_the_gradients_are_counted_and_the_nearest_to_the_loss_is_named(more, said):
    assert said in explain(outcome(Cause.BACKWARD, has_nan=True, **more), LAYERS)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (dict(index=2), "the gradient of 'c' is the largest."),
        (dict(index=2, count=1, nearest=2), "the gradient of 'c' is the largest."),
        (dict(index=1, count=2, nearest=2), "the gradient of 'b' is the first of 2 that are too large."),
    ],
)
def test_the_largest_is_called_so_only_if_it_is_known(more, said):
    assert said in explain(outcome(Cause.TOO_LARGE, **more), LAYERS)


def test_a_weight_is_not_blamed_where_a_lower_scale_was_seen_to_help():
    got = outcome(Cause.OVERFLOW, index=0, count=1, nearest=0, weight=1, lower_helps=True)
    said = explain(got, LAYERS)
    assert "overflowed at loss scale 32768; " in said
    assert said.endswith("; the weight 'b' is already non-finite, but that is not why. A lower scale helps.")
    assert int(got.variable) == 0


@pytest.mark.parametrize(("why", "loss"), [(Cause.LOSS, ", and so is the loss"), (Cause.OVERFLOW, "")])
def test_a_weight_that_is_not_finite_is_blamed_first(why, loss):
    said = explain(outcome(why, index=0, has_nan=True, count=4, nearest=3, weight=2), LAYERS)
    assert said.startswith(
        f"The step was skipped because the weight 'c' is already non-finite{loss}; the gradient of 'a'"
    )
    assert said.endswith("No loss scale can help: load earlier weights, and look for what assigned it.")


def test_a_loss_is_told_from_weights_only_if_they_were_looked_at():
    known = explain(outcome(Cause.LOSS, count=1, nearest=1), NAMES)
    assert "the loss itself was not finite, though all trained weights are; " in known
    assert "the loss itself was not finite; " in explain(outcome(Cause.LOSS), NAMES)


@pytest.mark.parametrize(
    ("helps", "pinned", "said"),
    [
        (True, "", "A lower scale helps."),
        (
            False,
            "",
            "A lower scale may help; if it does not, look for a square root, logarithm, division or norm at 0.",
        ),
        (True, "8 is the floor", "A lower scale helps, but 8 is the floor."),
        (False, "8 is the floor", "A lower scale may help, but 8 is the floor."),
    ],
)
def test_a_lower_scale_helps_only_if_that_was_seen_and_is_allowed(helps, pinned, said):
    assert explain(outcome(Cause.OVERFLOW, lower_helps=helps), NAMES, pinned).endswith(f". {said}")


def test_a_gradient_that_is_not_known_is_not_named():
    said = explain(outcome(Cause.OVERFLOW, index=-1), NAMES)
    assert "overflowed at loss scale 32768; the non-finite gradient was not recorded. A lower scale may help" in said


def test_a_step_that_was_not_due_is_not_called_applied():
    not_due = outcome(Cause.NONE, index=-1)._replace(finite=tf.constant(False))
    assert explain(not_due, NAMES) == "No step was attempted: it was not due."


def test_the_variable_to_look_at_first():
    assert int(outcome(Cause.OVERFLOW, index=1).variable) == 1
    assert int(outcome(Cause.OVERFLOW, index=1, nearest=3).variable) == 3
    assert int(outcome(Cause.OVERFLOW, index=1, nearest=3, weight=0).variable) == 0
    assert int(outcome(Cause.NONE, index=-1).variable) == -1


def skip_of(**fields):
    known = not_skipped()
    return known._replace(**{name: tf.constant(value, getattr(known, name).dtype) for name, value in fields.items()})


def numbers(skip):
    return tuple(value.numpy().item() for value in skip)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, {}),
        (dict(cause=3, has_nan=True, index=2, count=5, nearest=9, lower_helps=True), {}),
        (dict(cause=15, index=2**20 - 1, count=1, nearest=2**20 - 1), {}),
        (dict(cause=1, index=0, count=9, nearest=8, weight=0), dict(nearest=-1)),
        (dict(cause=2, index=3, count=10**6, nearest=4), dict(count=MOST_COUNTED)),
    ],
)
def test_the_last_skip_is_kept_in_the_numbers_of_old_checkpoints(given, kept):
    skip = skip_of(**given)
    stored = packed(skip)
    assert {name: value.dtype for name, value in stored.items()} == {
        "cause": tf.int64,
        "has_nan": tf.bool,
        "index": tf.int64,
    }
    assert numbers(unpacked(**stored)) == numbers(skip._replace(**{k: tf.constant(v) for k, v in kept.items()}))


@pytest.mark.parametrize(("cause", "index"), [(0, -1), (1, 0), (3, 7), (4, 2)])
def test_a_skip_of_an_old_checkpoint_is_read(cause, index):
    read = unpacked(whole(cause), tf.constant(True), whole(index))
    assert numbers(read) == (cause, True, index, 0, -1, -1, False)
    assert isinstance(read, Skip)


@pytest.mark.parametrize(("replica", "kept"), [(-1, -1), (0, 0), (13, 13), (14, 14), (500, 14)])
def test_the_replica_is_kept_beside_the_rest(replica, kept):
    skip = skip_of(cause=15, index=2**20 - 1, count=1, nearest=2**20 - 1)
    stored = packed(skip, whole(replica))
    assert numbers(unpacked(**stored)) == numbers(skip)
    last = LastSkip()
    last.keep(tf.constant(2.0), skip, whole(replica))
    assert int(last.outcome().replica) == kept


def test_a_replica_beyond_what_is_kept_is_told_so():
    said = explain(outcome(Cause.LOSS, index=0, replica=14), NAMES)
    assert "of the replicas, counted from 0, 14 or a later one is the first whose own are not finite" in said
    assert "of the replicas" not in explain(outcome(Cause.LOSS, index=0, replica=1, weight=1), NAMES)


def test_a_count_beyond_what_is_kept_is_told_so():
    said = explain(outcome(Cause.BACKWARD, index=0, count=MOST_COUNTED + 5, nearest=1), NAMES)
    assert "is the first of 2047 or more that are non-finite" in said


def test_before_any_step_and_any_skip():
    weight, loss_scaler = tf.Variable([1.0]), scaler.LossScaler(scaler.Static(1.0))
    assert loss_scaler.explain() == "No step was attempted yet."
    loss_scaler.apply(lambda grads, variables: None, [tf.constant([1.0])], [weight])
    assert loss_scaler.explain() == "No step was skipped yet: 1 of 1 attempted steps were applied."
    loss_scaler.scale(tf.constant(1.0))
    loss_scaler.update(scaler.Event(tf.constant(False)))
    assert loss_scaler.explain() == (
        "1 of 2 steps was skipped, the last through `update`, which does not know why. An "
        "`apply(scaler.move_nothing, grads, variables, update=False)` before it judges the gradients and does know."
    )


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (scaler.Dynamic(8.0), "may help; if"),
        (scaler.Dynamic(8.0, min_scale=8.0), "may help, but 8 is the floor of Dynamic: set a lower min_scale."),
        (scaler.Static(8.0), "may help, but Static keeps it at 8: choose a lower one, or a strategy that lowers it."),
        (scaler.NoScaling(), "may help, but NoScaling keeps it at 1: choose a lower one"),
    ],
    ids=str,
)
def test_a_scale_that_cannot_go_lower_is_told_with_what_forbids_it(strategy, said):
    loss_scaler = scaler.LossScaler(strategy)
    loss_scaler.scale(tf.constant(1.0))
    loss_scaler.apply(lambda grads, variables: None, [tf.constant([float("inf")])], [tf.Variable([1.0])])
    assert said in loss_scaler.explain()


def test_the_step_of_several_losses_is_not_told_of_its_own_scale():
    weight = tf.Variable([1.0])
    losses = scaler.PerLoss({"task": scaler.Dynamic(0.5)})
    losses.scale({"task": tf.constant(1.0)})
    losses.apply(lambda grads, variables: None, {"task": [tf.constant([float("inf")])]}, [weight])
    assert losses.explain().endswith(
        "and the only one. A lower scale may help; if it does not, look for a square "
        "root, logarithm, division or norm at 0."
    )
    assert "overflowed at loss scale 0.5" in losses.explain()
