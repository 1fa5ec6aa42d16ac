"""Guards the step that workers go on from, and what they cannot agree on: each has a folder, threads stand for them."""

import concurrent.futures
import json
import threading
import time

import pytest
import tensorflow as tf

import loops
from loops.actions import saves
from loops.actions.saves import Saves
from loops.loop.state import folder
from loops.loop.state.folder import FORMAT, newest_common, of_worker
from loops.loop.workers import Workers

FACTS = json.dumps(
    {
        "format": FORMAT,
        **{part: {} for part in ("identity", "versions", "variables", "actions", "random")},
        **{"settings": {}, "trainable": {}, "action_keys": {}, "held": []},
        "counters": dict.fromkeys(("data", "attempted", "applied", "skipped"), 0),
        "data": {"batches": 0, "problem": None, "caveats": []},
    }
)
"""Those of a run that has done nothing."""


class Threads:
    """Workers that are threads of one process."""

    def __init__(self, count):
        self.rows, self.barrier = [None] * count, threading.Barrier(count, timeout=30)

    def run(self, function):
        """What `function(workers)` returns or raises for each."""
        with concurrent.futures.ThreadPoolExecutor(len(self.rows)) as pool:
            futures = [pool.submit(function, Thread(self, index)) for index in range(len(self.rows))]
            return [future.exception() or future.result() for future in futures]


class Thread(Workers):
    def __init__(self, all_of_them, index):
        self.all, self.index, self.count = all_of_them, index, len(all_of_them.rows)

    def gather(self, values):
        self.all.rows[self.index] = list(values)
        self.all.barrier.wait()
        rows = list(self.all.rows)
        self.all.barrier.wait()
        return rows


def write(where, *numbers, damaged=()):
    where.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        facts = tf.Variable(FACTS)
        tf.train.Checkpoint(facts=Facts(facts)).write(folder.prefix(where, number))
        if number in damaged:
            (where / f"ckpt-{number}.data-00000-of-00001").write_bytes(b"torn")


class Facts(tf.train.experimental.PythonState):
    def __init__(self, text):
        self.text = text

    def serialize(self):
        return self.text.numpy()

    def deserialize(self, string_value): ...


def common(directory):
    """The step that each of two workers goes on from, and those it found damaged; or the error."""

    def of(workers):
        where = of_worker(directory, workers)
        number, _, damaged = newest_common(where, workers, folder.newest_whole(where))
        return number, sorted(damaged)

    return Threads(2).run(of)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([], [], None),
        ([4, 2], [4, 2], 4),
        ([6, 4], [4, 2], 4),
        ([4, 2], [6, 4], 4),
        ([2], [], None),  # Killed during the very first save.
        ([], [2], None),
    ],
)
def test_they_go_on_from_the_newest_step_that_both_have(tmp_path, first, second, expected):
    write(tmp_path, *first)
    write(tmp_path / "worker-1", *second)
    assert common(tmp_path) == [(expected, []), (expected, [])]


def test_one_damaged_checkpoint_takes_all_to_the_one_before(tmp_path):
    write(tmp_path, 6, 4)
    write(tmp_path / "worker-1", 6, 4, damaged=[6])
    assert common(tmp_path) == [(4, []), (4, [6])]


@pytest.mark.parametrize(("first", "second"), [([6, 4], []), ([6, 4], [2]), ([], [6, 4])])
def test_without_a_common_step_nothing_starts_over_silently(tmp_path, first, second):
    write(tmp_path, *first)
    write(tmp_path / "worker-1", *second)
    found = common(tmp_path)
    assert [type(error) for error in found] == [loops.CheckpointError] * 2
    text = f"worker 0 has {len(first)}; worker 1 has {len(second)}"
    assert all(text in str(error) and "Give each worker the folder that it had" in str(error) for error in found)


def test_an_error_of_one_worker_is_said_on_all():
    def act(workers):
        with workers.all_or_none("use its checkpoints"):
            if workers.index == 1:
                raise loops.CheckpointError("full")
        return "went on"

    first, second = Threads(2).run(act)
    assert isinstance(first, loops.WorkerLost)
    assert str(first).startswith("worker 1 cannot use its checkpoints, so worker 0 stops, too")
    assert isinstance(second, loops.CheckpointError)
    assert str(second) == "full"
    assert Threads(2).run(lambda workers: workers.gather([workers.index])) == [[[0], [1]]] * 2


def numbers_loop(checkpoint, *others):
    loop = loops.Loop(lambda number: {"loss": number}, tf.data.Dataset.range(9), actions=[*others, checkpoint])
    loop.workers = Thread(Threads(1), 0)
    loop.workers.count = 2
    return loop


def test_what_workers_could_do_at_different_steps_is_refused(tmp_path):
    with pytest.raises(loops.CheckpointError, match=r"every=Seconds.*several workers.*Give a number of steps"):
        numbers_loop(loops.Checkpoint(tmp_path, every=loops.Seconds(1))).run(3)
    data = tf.data.Dataset.from_tensors((1.0, 1.0))
    import keras

    evaluate = loops.Evaluate(lambda x, training: x, data, [keras.metrics.Mean(name="m")], every=1)
    best = loops.Checkpoint(tmp_path, every=2, best=loops.Best(evaluate, "m", "min"))
    with pytest.raises(loops.CheckpointError, match=r"best=.*several workers.*each would keep another step"):
        numbers_loop(best, evaluate).run(3)
    assert not list(tmp_path.iterdir())


def saves_beside(directory, workers):
    """What a `Checkpoint(keep=2, background=True)` writes with on each worker."""
    where = of_worker(directory, workers)
    where.mkdir(parents=True, exist_ok=True)
    made = Saves(tf.train.Checkpoint(facts=Facts(tf.Variable(FACTS))), where, 2, 0, workers, background=True)
    made.open()
    return made


def nothing():
    """What comes after a save."""


def test_none_begins_to_save_beside_its_steps_before_all_have_their_last_one(tmp_path, monkeypatch):
    write, there = saves.write, []

    def slow(where, number, copied):
        there.append((number, {max(folder.numbers(one), default=0) for one in (tmp_path, tmp_path / "worker-1")}))
        time.sleep(0.2 * (where != tmp_path))
        write(where, number, copied)

    monkeypatch.setattr(saves, "write", slow)

    def of(workers):
        made = saves_beside(tmp_path, workers)
        for number in (2, 4, 6):
            made.save(number, nothing)
        made.end(7, nothing)
        made.close()
        return folder.numbers(of_worker(tmp_path, workers))

    # At the end none waits for the others, which may be gone, and one more is kept for those that have less.
    assert Threads(2).run(of) == [[7, 6, 4]] * 2
    for number, newest in there:
        assert newest <= {number, number - 2} if number < 7 else newest <= {7, 6, 4}
    assert common(tmp_path) == [(7, []), (7, [])]


def test_after_an_error_on_one_worker_there_is_a_step_that_all_have(tmp_path, monkeypatch):
    write = saves.write

    def full(where, number, copied):
        if number >= 6 and where != tmp_path:
            raise tf.errors.ResourceExhaustedError(None, None, "the disk is full")
        write(where, number, copied)

    monkeypatch.setattr(saves, "write", full)

    def of(workers):
        made, found = saves_beside(tmp_path, workers), []
        for number in (2, 4, 6, 8):
            try:
                made.save(number, nothing)
            except loops.LoopError as error:
                found.append((type(error), str(error)))
                break
        try:
            made.end(8, nothing)
        except loops.CheckpointError as error:
            found.append((type(error), str(error)))
        made.close()
        return [*found, folder.numbers(of_worker(tmp_path, workers))]

    first, second = Threads(2).run(of)
    assert first[0][0] is loops.WorkerLost
    assert first[0][1].startswith("worker 1 cannot write its last checkpoint, so worker 0 stops, too")
    assert first[1:] == [[8, 6, 4]]
    assert second[0] == second[1]  # Its end does not try again: it would remove what is common.
    assert "step 6 could not be saved (the disk is full)" in second[0][1]
    assert second[2] == [4, 2]
    assert common(tmp_path) == [(4, []), (4, [])]
