"""Guards which steps of a visit are taken for skipped, why, and which of them is looked at first."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from loops.backend import captured
from loops.diagnose.explain.action import skipped_steps
from loops.diagnose.explain.at_hand import Recent, at_hand

LOSS, BACKWARD, OVERFLOW = scaler.Cause.LOSS, scaler.Cause.BACKWARD, scaler.Cause.OVERFLOW


def visit(steps, **outputs):
    """A visit behind step 10 of the last so many steps."""
    arrays = {name: np.array(values) for name, values in outputs.items()}
    return loops.Visit(loops.Counters(10, 10, 8), arrays or {"loss": np.zeros(steps)}, 1.0, 20)


def skipping(cause=LOSS, loss_scale=8.0, in_a_row=1):
    """A scaler whose last skip was such."""
    last = types.SimpleNamespace(cause=cause, loss_scale=loss_scale, variable=4)
    return types.SimpleNamespace(last_skip=last, counters=types.SimpleNamespace(consecutive_skips=in_a_row))


def test_the_skips_with_the_fewest_updates_since_come_first():
    applied = [True, False, True, False, False]
    causes = [0, 1, 0, 2, 1]
    found = skipped_steps(
        visit(5, applied=applied, cause=causes, variable=[-1, 3, -1, 3, 5], loss_scale=[2.0] * 5), [skipping(LOSS, 4.0)]
    )
    assert [(one.step, one.cause, one.variable, one.updates) for one in found] == [
        (9, BACKWARD, 3, 0),
        (10, LOSS, 5, 0),
        (7, LOSS, 3, 1),
    ]
    # The scaler itself knows the scale of the last one.
    assert [one.scales[0][1] for one in found] == [2.0, 4.0, 2.0]


def test_micro_batches_that_decide_nothing_are_not_skips():
    found = skipped_steps(visit(4, attempted=[False, True, False, True], applied=[False, True, False, False]), [])
    assert [(one.step, one.cause, one.updates) for one in found] == [(10, OVERFLOW, 0)]
    assert skipped_steps(visit(2, attempted=[False, False], applied=[False, False]), []) == []


def test_a_step_that_returns_its_loss_alone_asks_its_scalers():
    still = skipping(in_a_row=0)
    (found,) = skipped_steps(visit(3, loss=[1.0, 2.0, 3.0]), [still, skipping(BACKWARD, 16.0)])
    assert (found.step, found.cause, found.variable, found.updates) == (10, BACKWARD, 4, 0)
    assert [scale for _, scale in found.scales] == [16.0]
    assert skipped_steps(visit(3), [still]) == []


@pytest.mark.parametrize(("loss", "cause"), [(np.nan, LOSS), (1.0, OVERFLOW)])
def test_an_earlier_skip_is_known_by_its_loss(loss, cause):
    found = skipped_steps(visit(2, applied=[False, True], loss=[loss, 1.0]), [skipping(in_a_row=0)])
    assert [(one.step, one.cause, one.updates) for one in found] == [(9, cause, 1)]


@pytest.mark.parametrize(("outputs", "known"), [((), False), (("cause",), False), (("cause", "variable"), True)])
def test_the_kind_of_an_earlier_skip_is_known_if_the_step_returns_it(outputs, known):
    columns = {name: [1, 1] for name in outputs}
    earlier, last = sorted(
        skipped_steps(visit(2, applied=[False, False], loss=[np.nan] * 2, **columns), [skipping()]),
        key=lambda one: one.step,
    )
    assert (earlier.kind is not None) == known
    assert last.kind is not None


RECENT = Recent(1, tf.constant([1.0]))


def step(batch):
    return {"loss": tf.reduce_sum(batch)}


def from_python():
    return tf.data.Dataset.from_generator(lambda: iter([[1.0]]), output_signature=tf.TensorSpec([1]))


PLAIN = tf.data.Dataset.from_tensors([1.0])
DATA = {
    "plain": PLAIN,
    "generator": from_python(),
    "numpy_function": PLAIN.map(lambda x: tf.ensure_shape(tf.numpy_function(abs, [x], x.dtype), [1])),
}


@pytest.mark.parametrize("kind", DATA)
def test_numbers_that_threads_of_the_data_drew_are_not_drawn_again(kind):
    np.random.seed(0)
    first = np.random.random()
    np.random.seed(0)
    with at_hand(loops.Loop(step, DATA[kind]), RECENT) as point:
        assert point.loop.calls.one(point.batch)["loss"] == 1.0
        assert np.random.random() == first
        point.reset()
    assert (np.random.random() == first) == (kind == "plain")


def calls_python(batch):
    return {"loss": tf.ensure_shape(tf.numpy_function(np.sum, [batch], batch.dtype), [])}


ITERATOR = iter(tf.data.Dataset.random().map(lambda x: tf.cast(x, tf.float32)))


def calls_an_iterator(batch):
    return {"loss": tf.reduce_sum(batch) + next(ITERATOR)}


@pytest.mark.parametrize(("taken", "named"), [(calls_python, "PyFunc"), (calls_an_iterator, "a table or an iterator")])
def test_a_step_whose_state_cannot_be_put_back_is_not_repeated(taken, named, monkeypatch):
    # An iterator is put back where it is found.
    monkeypatch.setattr(captured, "owners", lambda handles: {})
    loop = loops.Loop(taken, PLAIN)
    with pytest.raises(loops.LoopError, match=f"uses .*{named}.* cannot be put back"), at_hand(loop, RECENT):
        pass


def test_no_variable_is_named_by_its_place_in_a_list_that_is_not_the_models():
    """A step of one's own gives its variables in another order than its model's; the last gradient is huge."""
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2, name="only")], name="model")
    loss_scaler, optimizer, variables = scaler.LossScaler(scaler.Static(8.0)), keras.optimizers.SGD(0.1), model.weights

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
            scaled = loss_scaler.scale(loss)
        bias, kernel = tape.gradient(scaled, variables[::-1])
        outcome = loss_scaler.apply(optimizer, [bias, 0.0 * kernel + 1e30], variables[::-1])
        return {"loss": loss, "applied": outcome.finite, "cause": outcome.cause, "variable": outcome.variable}

    x = tf.ones([2, 4])
    outputs = step(x)
    assert (bool(outputs["applied"]), int(outputs["variable"])) == (False, 1)
    assert "'model/only/kernel'" in loss_scaler.explain()
    found = loops.observe.explain_batch(step, x, seconds=0)
    assert (found.verdict, found.tensor, found.layer) == ("too_large", None, None)
