"""Guards that the batches of a call are held as they were, in every kind of call, as far as there is room."""

import numpy as np
import pytest
import tensorflow as tf

import loops
from loops.loop import kept_batches
from loops.loop.kept_batches import HeldBatches


def step(batch):
    return {"loss": tf.reduce_sum(tf.cast(batch["x"], tf.float32))}


def data(*, endless=True, sizes=False):
    """Batches {"x": [n] or [1, ..., n], "name": "n"}."""
    found = tf.data.Dataset.range(1, 40)
    if sizes:
        return found.map(lambda n: {"x": tf.range(1, n + 1), "name": tf.strings.as_string(n)})
    found = found.map(lambda n: {"x": n[tf.newaxis], "name": tf.strings.as_string(n)})
    return found.repeat() if endless else found


def held_by(dataset, steps, least=2, **arguments):
    loop = loops.Loop(step, dataset, **arguments)
    held = HeldBatches(loop.element_spec, least)
    loop.calls.hold_batches(held)
    loop.run(steps)
    return held


def names(held):
    found = {number: held.get(number) for number in range(45) if held.holds(number)}
    assert all(found[number]["x"].numpy()[-1] == number for number in found)
    assert [int(one["name"].numpy()) for one in found.values()] == list(found)
    return list(found)


@pytest.mark.parametrize(
    ("steps_per_call", "options"),
    [(1, {}), (4, {"endless": False}), (4, {"sizes": True})],
    ids=["one by one", "ending", "sizes"],
)
def test_the_batches_of_the_newest_call_are_held(options, steps_per_call):
    assert names(held_by(data(**options), 10, steps_per_call=steps_per_call)) == [9, 10]


def test_a_window_of_batches_is_held_over_calls():
    """A loop that chooses takes one step at first, in the graph of calls of many."""
    held = held_by(data(), 10, least=4, steps_per_call=None)
    assert names(held)[-4:] == [7, 8, 9, 10]


@pytest.mark.parametrize("endless", [True, False])
def test_the_oldest_give_way(monkeypatch, endless):
    # Three batches of 8 bytes for the number, and of one for what has no size of its own.
    monkeypatch.setattr(kept_batches, "_BYTES", 3 * 9)
    held = held_by(data(endless=endless), 10, steps_per_call=10)
    assert held.most == 3
    assert names(held) == [8, 9, 10]


def test_the_last_batch_says_how_many_of_unknown_size_there_is_room_for(monkeypatch):
    monkeypatch.setattr(kept_batches, "_BYTES", 3 * (20 * 8 + 1))
    held = held_by(data(sizes=True), 20, steps_per_call=20)
    assert (names(held), held.most) == (list(range(5, 21)), 3)


def test_nothing_is_copied():
    """What the host holds of a call of one step is the tensor that the step got."""
    held, given = HeldBatches({"x": tf.TensorSpec([2])}), tf.constant([1.0, 2.0])
    held.saw([{"x": given}], 1)
    assert held.get(1)["x"] is given
    assert held.get(2) is None


def test_batches_with_a_dataset_inside_cannot_be_held():
    assert not HeldBatches(tf.data.Dataset.range(4).window(2).element_spec).possible


def test_a_call_that_holds_gives_the_same_outputs():
    seen = []
    held_by(data(), 10, steps_per_call=5, actions=[seen.append])
    assert np.concatenate([visit.outputs["loss"] for visit in seen]).tolist() == list(range(1, 11))
