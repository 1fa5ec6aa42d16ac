"""Guards that an error out of a step of one's own says at which step it came, with what batches, in its own words."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from recorded_cases import steps_of

import loops
import scaler
from loops.loop.failed_step import described
from loops.record.skips import health, what_is_wrong

X, LABELS = np.ones([64, 3], np.float32), np.zeros([64], np.int32)


def notes(caught):
    return [one for one in getattr(caught.value, "__notes__", []) if one.startswith("halfstep: this came")]


@pytest.mark.parametrize(
    ("wrapped", "with_checkpoint"), [(lambda step: step, False), (tf.function, True)], ids=["plain", "function"]
)
def test_labels_of_another_shape_are_told_beside_the_words_of_keras(tmp_path, wrapped, with_checkpoint):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(4)])
    loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True)

    def my_step(x, y):
        return {"loss": loss_fn(y, model(x, training=True))}

    actions = [loops.Checkpoint(tmp_path, every=2)] if with_checkpoint else []
    data = tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(8)
    with pytest.raises(ValueError, match="must have the same rank") as caught:
        loops.Loop(wrapped(my_step), data, actions=actions).run(4)
    # A checkpoint has the step traced before there is a batch.
    known = (
        "batches of (float32 [None, 3], int32 [None])" if with_checkpoint else "a batch of (float32 [8, 3], int32 [8])"
    )
    assert notes(caught) == [f"halfstep: this came at step 1 of the run, in my_step, with {known}."]


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_the_step_that_fails_later_is_the_one_that_is_named(steps_per_call):
    def my_step(number):
        tf.debugging.assert_none_equal(number, tf.constant(5, tf.int64), message="the fifth")
        return {"loss": number}

    loop = loops.Loop(my_step, tf.data.Dataset.range(1, 9), steps_per_call=steps_per_call)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the fifth") as caught:
        loop.run(8)
    known = "a batch" if steps_per_call == 1 else "batches"
    assert notes(caught) == [f"halfstep: this came at step 5 of the run, in my_step, with {known} of int64 []."]


def fails_at_five(number):
    tf.debugging.assert_none_equal(number, tf.constant(5, tf.int64), message="the fifth")
    return number


def generated():
    for number in range(1, 9):
        if number == 5:
            raise ValueError("the fifth")
        yield number


DATA = {
    "map": tf.data.Dataset.range(1, 9).map(fails_at_five),
    "ahead": tf.data.Dataset.range(1, 9).map(fails_at_five, num_parallel_calls=2).prefetch(2),
    "endless": tf.data.Dataset.range(1, 9).map(fails_at_five).repeat(),
    "generator": tf.data.Dataset.from_generator(generated, output_signature=tf.TensorSpec([], tf.int64)),
}


@pytest.mark.parametrize(("data", "steps_per_call"), [("map", 1), ("ahead", 3), ("endless", 3), ("generator", 1)])
def test_an_error_of_the_dataset_is_told_as_that(data, steps_per_call):
    taken = tf.Variable(0, dtype=tf.int64)

    def my_step(number):
        return {"loss": number, "taken": taken.assign_add(number // number)}

    loop = loops.Loop(my_step, DATA[data], steps_per_call=steps_per_call)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the fifth") as caught:
        loop.run(8)
    place = "in the dataset, which gave no batch for it, with batches of int64 []."
    assert notes(caught) == [f"halfstep: this came at step 5 of the run, {place}"]
    assert loop.counters.data == int(taken) == 4


def lost(caught):
    return [one for one in caught.value.__notes__ if "no action has seen" in one]


ONE, FOUR = "step 4 of the same call was", "steps 1 to 4 of"


@pytest.mark.parametrize(
    ("steps_per_call", "which", "where"),
    [(2, None, "dataset"), (3, ONE, "step"), (8, FOUR, "dataset"), (8, FOUR, "source")],
)
def test_steps_that_no_action_saw_are_named(tmp_path, where, steps_per_call, which):
    step = fails_at_five if where != "dataset" else tf.identity
    data = {
        "dataset": DATA["map"],
        "step": tf.data.Dataset.range(1, 9),
        "source": (np.int64(number) for number in range(1, 9)),
    }[where]
    log = tmp_path / "steps.jsonl"
    seen = []

    def my_step(number):
        return {"loss": step(number), "applied": True}

    actions = [loops.JsonLines(log), lambda visit: seen.extend(visit.outputs["loss"].tolist())]
    loop = loops.Loop(my_step, data, steps_per_call=steps_per_call, actions=actions)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the fifth") as caught:
        loop.run(8)
    assert loop.counters.data == 4
    assert len(lost(caught)) == (which is not None)
    assert which is None or f"halfstep: {which}" in lost(caught)[0]
    said = set(range(1, 5)) - set(seen)
    # The run goes on, and what is missing afterwards is what was said.
    assert loop.run(7).data == 7
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert set(range(1, 8)) - {row["step"] for row in rows} == said
    assert bool(said) == (f"The log has only {7 - len(said)} of 7 steps" in what_is_wrong(health(steps_of(rows))))


def test_one_of_our_own_errors_says_it_in_its_sentence():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(4)])
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    labels = np.where(np.arange(64) < 40, 0, 7).astype(np.int32)
    step = loops.TrainStep(model, loss_fn, keras.optimizers.SGD(0.1))
    data = tf.data.Dataset.from_tensor_slices((X, labels)).batch(8, drop_remainder=True)
    with pytest.raises(loops.BadBatch, match=r"a label is 7.* Steps 4 to 5 of the same call were taken") as caught:
        loops.Loop(step, data, steps_per_call=3).run(8)
    assert "steps_per_call=1" in str(caught.value)


def test_our_own_sentences_need_no_note():
    with pytest.raises(scaler.ScalerError) as caught:
        loops.Loop(lambda number: 5, tf.data.Dataset.range(3)).run(2)
    assert notes(caught) == []


def test_any_batch_can_be_described():
    spec = {"x": tf.RaggedTensorSpec([None, None], tf.int32), "y": [tf.TensorSpec(None, tf.float16), None]}
    assert described(spec) == "{'x': int32 [None, None], 'y': [float16 of any shape, NoneType]}"
    assert described(tf.data.DatasetSpec(tf.TensorSpec([]))) == "DatasetSpec"
    assert described((np.array(["a", "b"], object), np.zeros([2, 3]))) == "(string [2], float64 [2, 3])"
    assert described({"x": tf.zeros([0, 3])}) == "{'x': float32 [0, 3]}"
