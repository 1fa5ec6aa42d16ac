"""Guards what a loop does when its dataset ends, is empty, or is made of something else than pairs."""

import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from loop_cases import numbers, summing

import loops
import scaler
from loops.loop.state import position
from loops.loop.state.position import Position


@pytest.mark.parametrize("steps_per_call", [1, 100])
def test_a_dataset_that_ends_keeps_counters_and_lines(tmp_path, steps_per_call):
    step, total = summing()
    path = tmp_path / "steps.jsonl"
    loop = loops.Loop(step, numbers(5), steps_per_call=steps_per_call, actions=[loops.JsonLines(path)])
    with pytest.raises(loops.OutOfData, match="ended after 5 of 12 steps"):
        loop.run(12)
    assert loop.counters == loops.Counters(5, 5, 5)
    assert total.numpy() == 15
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": n, "loss": n * (n + 1) / 2} for n in range(1, 6)]
    with pytest.raises(loops.OutOfData, match="ended after 5 of 6 steps"):
        loop.run(6)
    assert loop.counters.data == 5
    assert path.read_text().count("\n") == 5


@pytest.mark.parametrize(("steps_per_call", "endless"), [(1, False), (3, True), (10, False)])
def test_data_of_which_nothing_is_left_is_said_to_be_empty(steps_per_call, endless):
    step, total = summing()
    visits = []
    dropped = numbers(3).batch(4, drop_remainder=True).map(tf.reduce_sum)
    filtered = numbers(5).filter(lambda number: number > 9).repeat()
    assert filtered.cardinality() == tf.data.INFINITE_CARDINALITY
    data = filtered if endless else dropped
    loop = loops.Loop(step, data, steps_per_call=steps_per_call, actions=[visits.append])
    with pytest.raises(loops.OutOfData, match=r"empty.*drop_remainder"):
        loop.run(1)
    assert (loop.counters, total.numpy(), visits) == (loops.Counters(), 0, [])


@pytest.mark.parametrize(
    ("name", "endless"), [("numbers", True), ("filter", False), ("generator", False), ("choice", True), ("once", False)]
)
def test_what_is_sure_never_to_end(name, endless):
    data = {
        "numbers": lambda: numbers(5).shuffle(5, seed=0).repeat().batch(2).map(tf.reduce_sum).prefetch(1),
        "filter": lambda: numbers(5).filter(lambda number: number > 2).repeat(),
        "generator": lambda: tf.data.Dataset.from_generator(
            lambda: iter([1.0]), output_signature=tf.TensorSpec([], tf.float32)
        ).repeat(),
        "choice": lambda: tf.data.Dataset.sample_from_datasets([numbers(2).repeat(), numbers(3).repeat()], seed=0),
        "once": lambda: numbers(5),
    }[name]()
    assert Position(data).endless == endless


def test_data_that_is_sure_never_to_end_and_does_is_said_to(monkeypatch):
    monkeypatch.setattr(position, "surely_endless", lambda dataset: True)
    step, total = summing()
    loop = loops.Loop(step, numbers(2), steps_per_call=4)
    with pytest.raises(loops.OutOfData, match=r"ended after 2 steps.*cardinality is infinite"):
        loop.run(4)
    assert loop.counters == loops.Counters(2, 2, 2)
    assert total.numpy() == 3


@pytest.mark.parametrize("endless", [False, True])
def test_a_step_that_fails_has_not_taken_the_batch_after_its_own(endless):
    total = tf.Variable(0.0)

    def step(number):
        with tf.control_dependencies([tf.debugging.assert_less(number, 3.0)]):
            return {"loss": total.assign_add(number)}

    loop = loops.Loop(step, numbers(9).repeat(None if endless else 1), steps_per_call=5)
    with pytest.raises(tf.errors.InvalidArgumentError):
        loop.run(5)
    assert (loop.counters.data, float(total)) == (2, 3.0)
    assert float(next(loop.position.iterator)) == 4.0


PASSED = r"a batch of \(float32 \[0, 6\], float32 \[0, 2\]\)"
"""What failed, and not the batches around it."""
X, Y = np.ones([8, 6], np.float32), np.ones([8, 2], np.float32)


def a_model():
    return keras.Sequential([keras.Input([6]), keras.layers.Dense(2, use_bias=False)])


def one_loss():
    return loops.TrainStep(a_model(), keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.1))


def parts():
    model, loss_fn = a_model(), keras.losses.MeanSquaredError()
    part = loops.Part("only", model, lambda batch: loss_fn(batch[1], model(batch[0])), keras.optimizers.SGD(0.1))
    return loops.ComposedStep([part])


def by_hand():
    model, loss_fn, optimizer = a_model(), keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.1)
    loss_scaler = scaler.LossScaler(scaler.Static(8.0))

    def my_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
            scaled = loss_scaler.scale(loss)
        loss_scaler.apply(optimizer, tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return {"loss": loss}

    return my_step


@pytest.mark.parametrize(("make", "steps_per_call"), [(parts, 1), (by_hand, 3)])
def test_an_iterator_that_gives_no_rows_is_told(make, steps_per_call):
    batches = ((X[:rows], Y[:rows]) for rows in (8, 0, 8))
    tf.config.run_functions_eagerly(steps_per_call == 1)
    loop = loops.Loop(make(), batches, steps_per_call=steps_per_call)
    kind, words = (scaler.InvalidArgument, "was the batch empty") if make is by_hand else (loops.BadBatch, "no rows")
    with pytest.raises(kind, match=words) as caught:
        loop.run(3)
    assert any(re.search(rf"step 2 of the run.* with {PASSED}\.$", note) for note in caught.value.__notes__)
    assert loop.counters.data == 1


def test_the_first_batch_may_be_it():
    with pytest.raises(loops.BadBatch, match="no rows") as caught:
        loops.Loop(one_loss(), iter([(X[:0], Y[:0]), (X, Y)])).run(2)
    assert any(re.search(rf"step 1 of the run.* with {PASSED}\.$", note) for note in caught.value.__notes__)


def test_a_dataset_may_give_one():
    data = tf.data.Dataset.from_tensor_slices([8, 0, 8]).map(
        lambda rows: (tf.constant(X)[:rows], tf.constant(Y)[:rows])
    )
    seen = []
    counters = loops.Loop(one_loss(), data, actions=[lambda visit: seen.extend(visit.outputs["loss"])]).run(3)
    assert (counters.applied, seen[1]) == (3, 0.0)
