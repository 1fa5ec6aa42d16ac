"""Guards the position in a dataset: saved where it can be, recognised with its operation's name where it cannot."""

import warnings

import numpy as np
import pytest
import tensorflow as tf
from position_cases import generated, numbers

import loops
from loops.loop.state import folder


def looping(dataset, place, resume=False):
    """A loop whose losses are the numbers it was given."""
    total = tf.Variable(0, dtype=tf.int64)
    seen = []

    def step(number):
        loss = tf.reduce_sum(number)
        total.assign_add(loss)
        return {"loss": loss}

    actions = [lambda visit: seen.extend(visit.outputs["loss"].tolist())]
    actions += [loops.Checkpoint(place, every=100, resume=resume)]
    return loops.Loop(step, dataset, steps_per_call=1, actions=actions), seen, total


def test_what_cannot_save_its_position_is_named_and_skipped(tmp_path):
    loop, seen, _ = looping(generated(20), tmp_path)
    with pytest.warns(loops.ResumeWarning, match="position in the dataset cannot be saved") as caught:
        loop.run(7)
    message = str(caught[0].message)
    assert len(caught) == 1
    named = "PyFunc (from_generator or numpy_function)"
    for text in (named, "skips the batches", "That takes their time again", "stateless"):
        assert text in message
    assert seen == list(range(7))
    data = folder.read_facts(folder.prefix(tmp_path, 7))["data"]
    assert (data["batches"], data["caveats"]) == (7, [message.removeprefix("Checkpoint: ")])
    assert named in data["problem"]

    loop, seen, total = looping(generated(20), tmp_path, resume=True)
    with pytest.warns(loops.ResumeWarning, match="cannot be saved"):
        loop.run(12)
    assert seen == list(range(7, 12))
    assert int(total) == sum(range(12))


@pytest.mark.parametrize(
    "make",
    [lambda: numbers(5).shuffle(5, seed=2).repeat(), lambda: numbers(10).shuffle(10, seed=1).repeat(5).batch(4)],
    ids=["numbers", "batches of unknown size"],
)
def test_what_can_save_its_position_goes_on_without_a_warning(tmp_path, make):
    whole = [int(tf.reduce_sum(number)) for number in make().take(12)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", loops.ResumeWarning)
        loop, seen, _ = looping(make(), tmp_path)
        loop.run(7)
        loop, again, _ = looping(make(), tmp_path, resume=True)
        loop.run(12)
    assert seen + again == whole


def test_a_position_in_one_kind_of_dataset_is_not_taken_for_that_of_another(tmp_path):
    looping(numbers(20), tmp_path)[0].run(2)
    with pytest.raises(loops.CheckpointError, match="holds a position in the data"):
        looping(generated(20), tmp_path, resume=True)[0].run(4)


def test_an_iterator_may_also_end_where_it_was_saved(tmp_path):
    looping(numbers(4), tmp_path)[0].run(4)
    loop, seen, _ = looping(numbers(4), tmp_path, resume=True)
    with pytest.raises(loops.OutOfData, match="ended after 4 of 6"):
        loop.run(6)
    np.testing.assert_equal(seen, [])
