"""Guards a loop over a source of batches that is no dataset: the same steps, and what ends, fails or waits."""

import collections
import os
import signal
import threading
import traceback

import numpy as np
import pytest
import tensorflow as tf
from processes import wait_for
from source_cases import Numbered, Run, dataset, expected, plain

import loops
import scaler
from loops.loop import fetching
from loops.loop.kept_batches import HeldBatches
from loops.loop.source import Source, arrays_of, size_of, spec_of, stack, tensors_of
from loops.run.rewind.batches import stored_by

Pair = collections.namedtuple("Pair", ["x", "y"])


class Tensor:
    """As a tensor of PyTorch: it has `numpy()`, and no `__array__`."""

    def __init__(self, *values):
        self.values = values

    def numpy(self):
        return np.asarray(self.values)


def test_steps_are_those_of_a_dataset():
    """To the bit, with a last call that is short."""
    whole = Run(dataset(10), steps_per_call=4).go(10)
    run = Run(Numbered(), steps_per_call=4).go(10)
    assert run.losses == whole.losses == pytest.approx(expected(10))
    assert len(run.losses) == 10
    assert run.visits == whole.visits
    assert run.loop.counters == loops.Counters(10, 10, 10)


@pytest.mark.parametrize(
    ("steps_per_call", "batch", "element"),
    [
        (1, {"b": np.ones(2), "a": [1, 2]}, {"a": "int64 [2]", "b": "float64 [2]"}),
        (3, Pair(np.float32(1), True), Pair("float32 []", "bool []")),
        (1, [Tensor(1.0, 2.0), {"y": np.array(["one", "three"])}], ("float64 [2]", {"y": "string [2]"})),
        (1, tf.constant([1], tf.bfloat16), "bfloat16 [1]"),
    ],
    ids=["dict", "named tuple", "list", "tensor"],
)
def test_batches_may_be_nested(batch, element, steps_per_call):
    seen = []

    def step(batch):
        seen.append(tf.nest.map_structure(lambda part: f"{part.dtype.name} {part.shape.as_list()}", batch))
        return {"loss": tf.zeros([])}

    loops.Loop(step, (batch for _ in range(3)), steps_per_call=steps_per_call).run(3)
    assert seen[0] == element
    assert type(seen[0]) is type(element)


RECORD = b"\x08\x01\x00"
"""It ends with a zero byte, as many serialized records do."""


@pytest.mark.parametrize(
    "text",
    [
        RECORD,
        [RECORD, b"\x00\x00"],
        tf.constant(RECORD),
        tf.constant([RECORD, b""]),
        tf.constant([], tf.string),
        np.array([[RECORD], ["one\x00"]], object),
        [["a\x00", "b"]],
    ],
)
def test_text_arrives_whole(text):
    array = arrays_of(text)
    expected = tf.constant(text)
    (one,), both = tf.nest.flatten(tensors_of((array,))), stack([array, array])
    assert (one.dtype, spec_of(array)) == (tf.string, tf.TensorSpec(expected.shape, tf.string))
    assert bool(tf.reduce_all(tf.equal(one, expected)))
    assert bool(tf.reduce_all(tf.equal(both, tf.stack([expected, expected]))))
    assert size_of(array) >= int(tf.reduce_sum(tf.strings.length(expected)))


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (np.array([RECORD, 1], object), "a batch of the source is a ndarray of dtype object, not an array of numbers"),
        (np.zeros(2, "datetime64[s]"), r"a ndarray of dtype datetime64\[s\], not an array of numbers"),
        (np.ma.masked_array([1.0, 2.0], [False, True]), r"a batch of the source is a masked array.*batch.filled\(0\)"),
        ({"x": [[1, 2], [3]]}, r"a batch\['x'\] of the source is a list, not an array"),
        ((np.ones(1), tf.sparse.eye(2)), r"a batch\[1\] of the source is a SparseTensor, not an array"),
        ({"x": 1, 2: 3}, r"a dict with keys of several kinds, \['x', 2\]: expected text"),
    ],
)
def test_what_is_no_array_is_named(batch, said):
    with pytest.raises(loops.BadBatch, match=said):
        arrays_of(batch)


def test_memory_that_a_source_uses_again_is_copied():
    """The parts of a list are those of a step of two arguments."""

    def reused():
        batch = np.zeros(2, np.float32)
        for _ in range(8):
            batch += 1
            yield [batch, np.ones(())]

    losses = []
    see = [lambda visit: losses.extend(visit.outputs["loss"].tolist())]
    loops.Loop(lambda x, y: {"loss": x[0]}, reused(), steps_per_call=4, actions=see).run(8)
    assert losses == list(range(1, 9))


def test_other_shapes_do_not_move_the_visits():
    lengths = (2, 2, 3, 3, 3, 1)
    run = Run(Numbered(lengths=lengths), steps_per_call=7).go(14)
    assert run.losses == pytest.approx(expected(14, lengths))
    assert run.visits == [7, 14]


def test_large_batches_are_stacked_few_at_a_time(monkeypatch):
    monkeypatch.setattr(fetching, "MOST_BYTES", 20)
    stacks = []
    run = Run(Numbered(), steps_per_call=7)
    of_stack = run.loop.calls._of_stack
    monkeypatch.setattr(run.loop.calls, "_of_stack", lambda batches: stacks.append(len(batches)) or of_stack(batches))
    run.go(7)
    assert run.losses == pytest.approx(expected(7))
    assert (stacks, run.visits) == ([2, 2, 2, 1], [7])


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_the_last_batches_are_held_for_who_repeats_a_step(steps_per_call):
    run = Run(Numbered(), steps_per_call=steps_per_call)
    held = HeldBatches(run.loop.element_spec)
    run.loop.calls.hold_batches(held)
    run.go(8)
    assert [step for step in range(1, 9) if held.holds(step)] == ([7, 8] if steps_per_call == 1 else [5, 6, 7, 8])
    np.testing.assert_array_equal(held.get(7), np.full(2, 7.0, np.float32))
    assert run.losses == pytest.approx(expected(8))


def test_no_more_is_fetched_ahead_than_another_call_takes():
    source = Numbered()
    run = Run(source, steps_per_call=4).go(4)
    assert wait_for(lambda: source.given >= 8, 10)
    assert not wait_for(lambda: source.given > 8, 0.2)
    run.go(8)
    assert run.losses == pytest.approx(expected(8))


def test_an_output_that_follows_the_shape_of_its_batch_is_refused():
    lengths = iter([2, 2, 3])
    source = (np.ones(length, np.float32) for length in lengths)
    loop = loops.Loop(lambda batch: {"loss": batch[0], "all": batch}, source, steps_per_call=3)
    with pytest.raises(loops.BadOutputs, match=r"'all' with shape \(2,\) for one batch and \(3,\) for another"):
        loop.run(3)


def test_batches_of_every_shape_are_kept(tmp_path):
    keep = loops.KeepBatches(tmp_path, last=3)
    loop = loops.Loop(lambda batch: {"loss": batch[0]}, Numbered(lengths=(2, 3)), steps_per_call=4, actions=[keep])
    loop.run(5)
    kept = stored_by(loop)
    assert [kept.get(step).numpy().tolist() for step in (3, 4, 5)] == [[3.0] * 3, [4.0] * 2, [5.0] * 3]


@pytest.mark.parametrize(("make", "steps_per_call"), [(Numbered, 4), (plain, 1)])
def test_a_source_that_ends_keeps_what_was_done(make, steps_per_call):
    run = Run(make(6), steps_per_call=steps_per_call)
    for goal in (20, 7):
        with pytest.raises(loops.OutOfData, match=rf"source of batches ended after 6 of {goal} steps.*repeat\(\)"):
            run.go(goal)
    assert run.losses == pytest.approx(expected(6))
    assert run.loop.counters.data == 6


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_what_a_source_raises_is_raised_at_its_step(tmp_path, steps_per_call):
    """With its own frames, and after a save; the source goes on behind it."""
    run = Run(Numbered(failing=6), steps_per_call=steps_per_call, folder=tmp_path)
    with pytest.raises(KeyError, match="a broken record") as caught:
        run.go(20)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].filename.endswith("source_cases.py")
    assert run.losses == pytest.approx(expected(5))
    assert (tmp_path / "ckpt-5.index").exists()
    assert run.position == {"given": 5}
    run.go(8)
    assert run.loop.counters.data == 8
    assert run.position == {"given": 9}


def test_what_a_source_raises_first_or_that_it_is_empty_is_raised_by_the_loop():
    with pytest.raises(KeyError, match="a broken record"):
        Run(Numbered(failing=1))
    with pytest.raises(loops.OutOfData, match="source of batches is empty"):
        Run(plain(0))


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_step_that_fails_has_taken_its_batch_and_no_other(steps_per_call):
    weight = tf.Variable(0.0)

    def step(batch):
        with tf.control_dependencies([tf.debugging.assert_none_equal(batch, 3.0)]):
            return {"loss": weight.assign_add(batch[0])}

    loop = loops.Loop(step, Numbered(), steps_per_call=steps_per_call)
    with pytest.raises(tf.errors.InvalidArgumentError):
        loop.run(8)
    assert (loop.counters.data, weight.numpy()) == (2, 1 + 2)
    loop.run(4)
    assert weight.numpy() == 1 + 2 + 4 + 5


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (np.ones(2, np.float64), r"dtype=tf\.float64.*first one was.*tf\.float32"),
        ({"x": np.ones(2, np.float32)}, "expected the same parts and dtypes in all"),
        (None, "a batch of the source is a NoneType, not an array"),
    ],
)
def test_a_batch_that_is_none_is_named_at_its_step(second, said):
    run = Run(one for one in (np.ones(2, np.float32), second))
    with pytest.raises(loops.BadBatch, match=said):
        run.go(2)
    assert run.loop.counters.data == 1


@pytest.mark.parametrize(
    "data", [[np.ones(2)], (np.ones(2), np.ones(2)), np.ones((2, 2)), tf.ones([2, 2]), {}, "data", {1}, range(3)]
)
def test_data_that_is_no_batches_is_refused(data):
    with pytest.raises(scaler.InvalidArgument, match=r"expected a tf\.data\.Dataset, or an iterator or a loader"):
        Run(data)


@pytest.mark.parametrize("steps_per_call", [1, 8])
def test_ctrl_c_does_not_wait_for_a_batch(tmp_path, steps_per_call):
    """The steps of the batches that were there are taken and saved."""
    ready = threading.Event()
    run = Run(Numbered(waiting=(4, ready)), steps_per_call=steps_per_call, folder=tmp_path)
    run.loop.calls.trace()  # Before the alarm: a signal that comes while the run begins is another case.
    alarm = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    alarm.start()
    with pytest.raises(KeyboardInterrupt):
        run.go(8)
    alarm.join()
    assert run.losses == pytest.approx(expected(3))
    assert (tmp_path / "ckpt-3.index").exists()
    ready.set()
    assert run.go(8).losses == pytest.approx(expected(8))


def test_the_thread_ends_with_what_it_fetches_for():
    before = set(threading.enumerate())
    batches = fetching.Fetching(Source(Numbered()))
    assert [next(batches)[0].numpy() for _ in range(5)] == [1, 2, 3, 4, 5]
    (own,) = set(threading.enumerate()) - before
    del batches
    assert wait_for(lambda: not own.is_alive(), 10)
