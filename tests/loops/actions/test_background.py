"""Guards checkpoints that a thread writes: the same files and bits, a copy that no step reaches, and no error lost."""

import concurrent.futures
import threading

import numpy as np
import pytest
import tensorflow as tf
from checkpoint_cases import Counting, twelve_steps

import loops
from loops.actions import saves
from loops.actions.saves import HostCopy, Saves
from loops.backend import variables
from loops.loop.state import folder
from scaler.backend.graphs import has_gpu


@pytest.fixture(autouse=True)
def _eagerly():
    """As in `test_checkpoint.py`: nothing is traced for the steps."""
    tf.config.run_functions_eagerly(True)


class Disk:
    """What the thread does with a disk: it waits until it is let through, or fails at some steps."""

    def __init__(self, monkeypatch, failing=()):
        self.through, self.begun, self.failing = threading.Event(), [], failing
        write = saves.write

        def slow(place, number, copied):
            self.begun.append(number)
            assert self.through.wait(30)
            if number in self.failing:
                raise tf.errors.ResourceExhaustedError(None, None, "the disk is full")
            write(place, number, copied)

        monkeypatch.setattr(saves, "write", slow)

    def open(self):
        self.through.set()
        return self


def everything():
    """Of each kind that a run's state is made of: dtypes, shapes, tables that are written, and a position."""
    weights = [
        tf.Variable(tf.cast([[1.5, -2.0, 0.0]], dtype)) for dtype in ("float16", "bfloat16", "float32", "float64")
    ]
    counts = [tf.Variable(tf.cast(7, dtype)) for dtype in ("int8", "uint8", "int32", "int64", "uint64")]
    others = [tf.Variable([True, False]), tf.Variable(["a", ""]), tf.Variable(1 + 2j), tf.Variable(tf.zeros([0, 3]))]
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, 0.0)
    dense = tf.lookup.experimental.DenseHashTable(tf.int64, tf.float32, 0.0, -1, -2)
    table.insert(["one", "two"], [1.0, 2.0])
    dense.insert(tf.constant([5, 6], tf.int64), [5.0, 6.0])
    options = tf.data.Options()
    # Its thread moves the state of the position between two saves.
    options.experimental_optimization.inject_prefetch = False
    position = iter(tf.data.Dataset.range(100).shuffle(9, seed=1).with_options(options))
    next(position)
    variables = [*weights, *counts, *others]
    return tf.train.Checkpoint(variables=variables, table=table, dense=dense, position=position)


def change(checkpoint):
    """As a step does: in the variables' own memory, where it may."""
    for variable in checkpoint.variables:
        if variable.dtype == tf.string:
            variable.assign(["b", "c"])
        elif variable.dtype == tf.bool:
            variable.assign(~variable)
        else:
            # TensorFlow has no kernels of a GPU for small integers, and does not survive the lack of them.
            with tf.device("CPU:0" if variable.dtype.is_integer else None):
                variable.assign_add(tf.ones_like(variable))
    single = next(one for one in checkpoint.variables if one.dtype == tf.float32)
    tf.raw_ops.ResourceApplyGradientDescent(var=single.handle, alpha=1.0, delta=tf.ones_like(single))
    checkpoint.table.insert(["one"], [9.0])
    checkpoint.dense.insert(tf.constant([5], tf.int64), [9.0])
    next(checkpoint.position)


def files(place):
    return {path.name: path.read_bytes() for path in place.iterdir()}


def test_the_files_are_those_that_tensorflow_writes_though_steps_went_on_after_the_copy(tmp_path):
    checkpoint = everything()
    checkpoint.write(str(tmp_path / "theirs" / "ckpt-3"))
    (tmp_path / "ours").mkdir()
    memory = HostCopy(checkpoint)
    memory.get_memory()
    for _ in range(2):  # The second copy is in the memory of the first.
        copied = memory.take()
    change(checkpoint)
    saves.write(tmp_path / "ours", 3, copied)
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")


def test_what_has_grown_since_the_memory_was_given_is_copied_too(tmp_path):
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    checkpoint = tf.train.Checkpoint(table=table, one=tf.Variable(1.0))
    memory = HostCopy(checkpoint)
    table.insert(tf.range(10_000, dtype=tf.int64), tf.random.normal([10_000]))
    checkpoint.write(str(tmp_path / "theirs" / "ckpt-3"))
    (tmp_path / "ours").mkdir()
    saves.write(tmp_path / "ours", 3, memory.take())
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")


@pytest.mark.skipif(has_gpu(), reason="a host has other memory than a GPU")
def test_large_values_are_written_from_the_memory_of_the_copy():
    variable = tf.Variable(tf.zeros([1000]))
    (copied,) = (one for one in HostCopy(tf.train.Checkpoint(one=variable)).take() if "one" in one.name)
    own = np.asarray(variable.read_value())
    assert np.shares_memory(own, np.asarray(variable.read_value()))  # It is the variable's own memory.
    assert not np.shares_memory(copied.value, own)
    assert np.shares_memory(copied.value, np.asarray(copied.tensor))


def test_either_way_goes_on_from_what_the_other_saved(tmp_path):
    Counting(tmp_path, background=True).go(5)
    assert folder.numbers(tmp_path) == [5, 4, 2]
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "ckpt-5")
    Counting(tmp_path, resume=True).go(7)
    run = Counting(tmp_path, background=True, resume=True).go(12)
    assert run.bits() == twelve_steps()
    assert folder.numbers(tmp_path) == [12, 10, 8]
    assert not list(tmp_path.glob("*temp*"))


def test_steps_go_on_while_it_is_written_and_the_next_save_waits(tmp_path, monkeypatch):
    disk, seen = Disk(monkeypatch), []

    def look(visit):
        seen.append((visit.counters.data, list(disk.begun), folder.numbers(tmp_path)))
        if visit.counters.data == 4:  # The visit's save comes last.
            threading.Timer(0.2, disk.open).start()

    run = Counting(tmp_path, background=True, actions=[look]).go(12)
    assert seen[2][0] == 3
    assert seen[2][1] in ([], [2])  # Begun, or about to be.
    assert seen[3][2] == []  # Two steps were taken beside the write.
    assert 2 in seen[4][2]  # And it was over before the next one began.
    assert run.bits() == twelve_steps()
    assert folder.numbers(tmp_path) == [12, 10, 8]


def test_an_error_of_the_thread_is_raised_at_the_next_visit_and_the_last_step_is_saved(tmp_path, monkeypatch):
    Disk(monkeypatch, failing=[2]).open()

    def let_it_fail(visit):
        if visit.counters.data == 3:
            concurrent.futures.wait([run.checkpoint._saves._pending])

    run = Counting(tmp_path, background=True, actions=[let_it_fail])
    with pytest.raises(loops.CheckpointError) as caught:
        run.go(12)
    assert str(caught.value) == (
        f"{tmp_path}: step 2 could not be saved (the disk is full). The checkpoints before it are as they were: "
        "make room, then run again with resume=True (on the command line --resume)."
    )
    assert run.loop.counters.data == 3
    assert folder.numbers(tmp_path) == [3]


@pytest.mark.parametrize(("failing", "said"), [([4], ["step 4"]), ([4, 5], ["step 5", "step 4"]), ([5], ["step 5"])])
def test_an_error_at_the_end_is_raised_there(tmp_path, monkeypatch, failing, said):
    """The last step of a run, or its last save, which the end waits for."""
    disk, end = Disk(monkeypatch, failing), Saves.end

    def opened_first(saves, number, then):  # Opened at a visit, the thread may be done before that visit looks.
        disk.open()
        end(saves, number, then)

    monkeypatch.setattr(Saves, "end", opened_first)
    run = Counting(tmp_path, background=True, every=4)
    with pytest.raises(loops.CheckpointError) as caught:
        run.go(5)
    parts = str(caught.value).split(" Before that: ")
    assert [part.split(" could not")[0].split(": ")[1] for part in parts] == said
    assert folder.numbers(tmp_path) == [number for number in (5, 4) if number not in failing]
    assert not list(tmp_path.glob("*temp*"))
    disk.failing = ()
    run.go(8)
    assert folder.numbers(tmp_path)[0] == 8


def test_an_error_of_the_thread_is_told_beside_that_of_a_step(tmp_path, monkeypatch):
    """A step that raises is not saved, and what was being saved becomes whole or is named."""
    disk = Disk(monkeypatch, failing=[4])
    run = Counting(tmp_path, background=True)
    run.loop.actions.append(lambda visit: visit.counters.data == 4 and disk.open())
    broken = run.loop.calls._take

    def take(iterator, limit):
        if run.loop.counters.data == 4:
            raise tf.errors.InternalError(None, None, "broken")
        return broken(iterator, limit)

    run.loop.calls._take = take
    disk.open()
    with (
        pytest.warns(loops.ResumeWarning, match="step 4 could not be saved"),
        pytest.raises(tf.errors.InternalError, match="broken"),
    ):
        run.go(12)
    assert folder.numbers(tmp_path) == [2]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def test_the_folder_is_locked_until_the_last_save_is_whole(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    threading.Timer(0.2, disk.open).start()
    locked = []
    write = saves.write
    monkeypatch.setattr(saves, "write", lambda *parts: (write(*parts), locked.append((tmp_path / ".lock").exists())))
    Counting(tmp_path, background=True, every=3).go(3)
    assert locked == [True]
    assert not (tmp_path / ".lock").exists()


def test_waiting_makes_the_last_save_whole(tmp_path):
    found = []

    def look(visit):
        run.checkpoint.wait()
        found.append(folder.numbers(tmp_path))

    run = Counting(tmp_path, background=True, actions=[look])
    run.checkpoint.wait()  # Before it begins there is nothing to wait for.
    run.go(5)
    assert found == [[], [], [2], [2], [4, 2]]


def test_without_the_private_names_it_saves_at_the_visit(tmp_path, monkeypatch):
    monkeypatch.setattr(variables, "checkpoint_values", lambda checkpoint: checkpoint._saver._gone())
    run = Counting(tmp_path, background=True)
    with pytest.warns(UserWarning, match=rf"TensorFlow {tf.__version__} does not tell what a checkpoint writes"):
        run.go(5)
    assert folder.numbers(tmp_path) == [5, 4, 2]
    assert Counting(tmp_path, resume=True).go(12).bits() == twelve_steps()
