"""Guards `ComposedStep`: it is the step by hand, and a fault skips the part that it is in, or all, and nothing else."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from composed_cases import SHAPES, ByHand, Players, batches
from loop_cases import line
from models import batch, plain_model
from rigs import assert_finite, raw
from step_cases import part, tensors

import loops
import scaler

STEPS = 5
FAULTS = ((2, "critic"), (4, "actor"))
"""The actor takes its turn at every second step."""


def outputs_of(players, count=STEPS, **arguments):
    """The outputs of each step."""
    return [players.step(tensors(one)) for one in batches(count, **arguments)]


@pytest.mark.exhaustive_with("shared-2", "one scaler-1")
@pytest.mark.parametrize(("shape", "every"), [("turns", 2), ("shared", 2), ("one scaler", 1)])
def test_it_is_the_step_by_hand(shape, every):
    """In float32, where a fault skips the part that it is in, or both where one scaler decides."""
    arguments = {"every": every, "clip_norm": 0.01}
    players, other = Players(shape, **arguments), ByHand(shape, **arguments)
    outputs = outputs_of(players, bad=FAULTS)
    for number, (one, given) in enumerate(zip(outputs, batches(STEPS, FAULTS), strict=True), 1):
        bad = [part for place, part in FAULTS if place == number]
        skipped = ["critic", "actor"] if bad and shape == "one scaler" else bad
        losses = other.take(given, number, skipped)
        for name, loss in losses.items():
            np.testing.assert_allclose(one[f"{name}/loss"], np.nan if loss is None else loss, rtol=1e-4, atol=1e-6)
            turn = name == "critic" or number % every == 0
            assert bool(one[f"{name}/applied"]) == (turn and name not in skipped)
        assert bool(one["applied"]) == (not bad)
    for name in ("critic", "actor"):
        for ours, theirs in zip(players.held(name), other.held(name), strict=True):
            np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_fault_in_float16_skips_the_part_it_is_in_bit_for_bit(shape):
    players = Players(shape, "mixed_float16")
    step = tf.function(players.step) if shape == "turns" else players.step
    clean, *bad = map(tensors, batches(3, ((2, "critic"), (3, "actor"))))
    step(clean)
    for name, other, given in zip(("critic", "actor"), ("actor", "critic"), bad, strict=True):
        together = shape == "one scaler"
        # In turns the critic's pass has moved the statistics of the actor before.
        held = players.weights if shape == "turns" and name == "actor" else players.held
        before, rest = raw(held(name)), raw(players.held(other))
        scales = {part: float(one.loss_scale) for part, one in players.step.scalers.items()}
        outputs = step(given)
        assert not outputs[f"{name}/applied"]
        assert bool(outputs[f"{other}/applied"]) != together
        assert raw(held(name)) == before
        assert (raw(players.held(other)) == rest) == together
        # Bad data costs no scale, neither its own part's nor another's.
        assert {part: float(one.loss_scale) for part, one in players.step.scalers.items()} == scales
        assert int(outputs["cause"]) == scaler.Cause.LOSS
        assert list(players.step.weights)[int(outputs["variable"])].startswith(f"{name}/")
        assert step(clean)["applied"]
    assert_finite(players.variables())
    assert shape != "turns" or step.experimental_get_tracing_count() == 1


def test_the_outputs_carry_the_names_of_the_parts_and_no_loss_is_looked_at_where_it_is_not_the_turn_of_its_part():
    players = Players("shared", every=2)
    for outputs in outputs_of(players, 2, bad=((1, "actor"),)):
        own = ["loss", "attempted", "applied", "grad_norm", "clipped_norm", "loss_scale"]
        names = [f"critic/{name}" for name in (*own, "value")] + [f"actor/{name}" for name in own]
        assert list(outputs) == [*names, "attempted", "applied", "cause", "variable"]
        assert all(value.shape.rank == 0 for value in outputs.values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        players.step.check()
    assert int(players.step.scalers["actor"].counters.applied) == 1


@tf.custom_gradient
def broken(x):
    return x, lambda upstream: upstream * np.inf


@pytest.mark.exhaustive
def test_turns_of_a_table_and_of_a_variable_whose_backward_pass_is_at_fault():
    """A branch around sparse gradients."""
    table, number = keras.layers.Embedding(4, 2), tf.Variable(1.0, name="number")
    table.build()
    start = table.embeddings.numpy()
    losses = {"table": (table, lambda ids: tf.reduce_sum(table(ids))), "number": (number, lambda ids: broken(number))}
    parts = [
        part(name, *one, keras.optimizers.SGD(0.5), every=2, loss_scaler=scaler.LossScaler(name=name))
        for name, one in losses.items()
    ]
    step = tf.function(loops.ComposedStep(parts))
    ids = tf.constant([1, 1, 3])
    assert not step(ids)["attempted"]
    assert table.embeddings.numpy().tobytes() == start.tobytes()
    outputs = step(ids)
    np.testing.assert_array_equal(table.embeddings.numpy(), start - np.float32([[0], [1], [0], [0.5]]))
    assert outputs["table/applied"]
    assert not outputs["number/applied"]
    assert outputs["cause"] == scaler.Cause.OVERFLOW
    assert outputs["variable"] == 1
    assert number.numpy() == 1.0


def values(model):
    return [np.float32(variable) for variable in model.weights if "seed" not in variable.path]


def test_it_is_the_average_of_the_applied_steps():
    players = Players("shared", momentum=0.75, every=2)
    expected = values(players.teacher)
    for given in batches(4, bad=((2, "actor"), (4, "critic"))):
        before = raw(players.teacher.variables)
        outputs = players.step(tensors(given))
        if outputs["actor/applied"]:
            expected = [
                0.75 * one + np.float32(0.25) * own for one, own in zip(expected, values(players.actor), strict=True)
            ]
        else:
            assert raw(players.teacher.variables) == before
    for one, own in zip(expected, values(players.teacher), strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_float64_weights_are_averaged_in_float64_and_float32_ones_in_float32(momentum):
    keras.utils.set_random_seed(1)

    def made():
        wide = keras.layers.Dense(3, dtype="float64")
        return keras.Sequential([keras.Input([4]), keras.layers.Dense(5, dtype="float32"), wide])

    student, teacher = made(), made()

    def loss(x):
        return tf.reduce_mean(student(x) ** 2)

    step = loops.ComposedStep([part("student", student, loss, teacher=teacher, momentum=momentum)])
    for number in range(3):
        before = [variable.numpy() for variable in teacher.weights]
        assert step(tf.random.stateless_normal([8, 4], (0, number)))["student/applied"]
        for own, one, goal in zip(teacher.weights, before, student.weights, strict=True):
            kind = own.numpy().dtype.type
            expected = kind(momentum) * one + (kind(1.0) - kind(momentum)) * goal.numpy()
            # Fused multiply-adds round once less.
            np.testing.assert_allclose(own.numpy(), expected, rtol=4 * np.finfo(kind).eps, atol=np.finfo(kind).eps)


@pytest.mark.usefixtures("eagerly")
def test_a_resumed_run_with_another_momentum_says_so(tmp_path):
    def run(momentum):
        keras.backend.clear_session()
        step = loops.ComposedStep([part("student", line(), scale=8.0, teacher=line(), momentum=momentum)])
        checkpoint = loops.Checkpoint(tmp_path, every=1, resume=True)
        data = tf.data.Dataset.from_tensors(batch()).repeat()
        loops.Loop(step, data, steps_per_call=1, actions=[checkpoint]).run(1)

    run(0.5)
    with pytest.warns(loops.ResumeWarning, match=r"Part\(student\)\.?.*momentum was 0.5 and is 0.9"):
        run(0.9)


@pytest.mark.slow
def test_a_teacher_of_float16_does_not_stand_still():
    """The updates of a step are less than float16 can add to a weight; the student's master and the copy keep them."""
    student, teacher = plain_model("float16"), plain_model("float16")

    def loss(x):
        return tf.reduce_mean(tf.cast(student(x), tf.float32))

    own = part("student", student, loss, keras.optimizers.SGD(1e-3), scale=8.0, teacher=teacher, momentum=0.5)
    step = loops.ComposedStep([own])
    masters, copies = (one.weights for one in step.master_weights)
    expected = [np.asarray(one) for one in copies]
    for _ in range(8):
        assert step(tf.ones([2, 4]))["applied"]
        expected = [0.5 * one + 0.5 * np.asarray(own) for one, own in zip(expected, masters, strict=True)]
    for one, own, weight in zip(expected, copies, teacher.weights, strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-6)
        assert np.asarray(weight).tobytes() == np.asarray(own).astype(np.float16).tobytes()
    assert any(np.any(np.float32(one) != np.asarray(own)) for one, own in zip(teacher.weights, copies, strict=True))


def test_its_batch_norm_follows_without_a_warning_of_the_next_parts_snapshot():
    """The next part takes its snapshot after this one's teacher moved, and warnings are errors."""
    layers = [[keras.Input([4]), keras.layers.BatchNormalization(scale=False)] for _ in range(3)]
    student, teacher, other = map(keras.Sequential, layers)
    parts = [part("student", student, teacher=teacher, momentum=0.5), part("other", other)]
    tf.function(loops.ComposedStep(parts)).get_concrete_function(tensors(batch()))


def dense(units, **arguments):
    return keras.layers.Dense(units, kernel_initializer="ones", use_bias=False, **arguments)


def heads():
    """Two models over one regularized layer, whose penalty is 16."""
    shared = dense(4, kernel_regularizer=keras.regularizers.L2(1.0))
    models = [keras.Sequential([keras.Input([4]), shared, dense(units)]) for units in (1, 2)]
    for model in models:
        model.build([None, 4])
    return shared, models


GIVEN = {
    "two heads": lambda shared, one, two: [one, two],
    "a model and its layer": lambda shared, one, two: [one, shared],
    "one model": lambda shared, one, two: one,
    "a layer": lambda shared, one, two: shared,
}


@pytest.mark.parametrize("given", GIVEN)
def test_each_weight_is_regularized_once(given):
    shared, (one, two) = heads()

    def loss_fn(x):
        return 0.0 * (tf.reduce_sum(one(x)) + tf.reduce_sum(two(x)))

    own = part("both", GIVEN[given](shared, one, two), loss_fn, keras.optimizers.SGD(0.01))
    step = loops.ComposedStep([own])
    assert float(step(tf.ones([2, 4]))["both/loss"]) == 16.0
    # The slope of the penalty is 2.
    assert abs(float(shared.kernel[0, 0]) - 0.98) < 1e-6
