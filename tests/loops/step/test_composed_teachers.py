"""Guards the teacher of a `Part`: the exponential moving average of its student, and not a bit where it was skipped."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from composed_cases import Players, batches
from models import batch, one_layer, plain_model
from rigs import raw
from step_cases import part, tensors

import loops


def values(model):
    return [np.float32(variable) for variable in model.weights if "seed" not in variable.path]


@pytest.mark.exhaustive_with("turns", "one scaler")
@pytest.mark.parametrize("shape", ["turns", "shared", "one scaler"])
def test_it_is_the_average_of_the_applied_steps(shape):
    players = Players(shape, momentum=0.75, every=1 if shape == "one scaler" else 2)
    expected = values(players.teacher)
    for given in batches(6, bad=((4, "actor"), (6, "critic"))):
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
    loss = lambda x: tf.reduce_mean(student(x) ** 2)  # noqa: E731
    step = loops.ComposedStep([part("student", student, loss, teacher=teacher, momentum=momentum)])
    take = tf.function(step) if momentum == 0.9 else step
    for number in range(3):
        before = [variable.numpy() for variable in teacher.weights]
        assert take(tf.random.stateless_normal([8, 4], (0, number)))["student/applied"]
        for own, one, goal in zip(teacher.weights, before, student.weights, strict=True):
            kind = own.numpy().dtype.type
            expected = kind(momentum) * one + (kind(1.0) - kind(momentum)) * goal.numpy()
            # XLA and fused multiply-adds round once less.
            np.testing.assert_allclose(own.numpy(), expected, rtol=4 * np.finfo(kind).eps, atol=np.finfo(kind).eps)


def test_a_resumed_run_with_another_momentum_says_so(tmp_path):
    def run(momentum):
        keras.backend.clear_session()
        step = loops.ComposedStep([part("student", one_layer(), scale=8.0, teacher=one_layer(), momentum=momentum)])
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
    loss = lambda x: tf.reduce_mean(tf.cast(student(x), tf.float32))  # noqa: E731
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
    layers = [[keras.Input([4]), keras.layers.BatchNormalization()] for _ in range(3)]
    student, teacher, other = map(keras.Sequential, layers)
    parts = [part("student", student, teacher=teacher, momentum=0.5), part("other", other)]
    tf.function(loops.ComposedStep(parts)).get_concrete_function(tensors(batch()))
