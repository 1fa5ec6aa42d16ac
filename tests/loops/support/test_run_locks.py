"""Guards that what a run writes belongs to one run at a time, whatever becomes of the process."""

import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest
from loop_cases import taking as looping
from processes import server, start, wait_for

import loops
import scaler
from loops.support import run_locks
from loops.support.run_locks import Lock, LockHeld, RunLocks
from loops.support.written import Place

pytestmark = pytest.mark.usefixtures("eagerly")


def hold(path, ready, forks):
    """Takes a lock and waits, as a child that it forks does, too; sends that child's number."""
    Lock(path).take()
    child = os.fork() if forks else 0
    if child or not forks:
        ready.send(child)
    time.sleep(600)


@pytest.fixture
def elsewhere():
    """Starts processes that take a lock and wait."""
    started, children = [], []

    def start_one(path, forks=False):
        told, ready = server().Pipe(duplex=False)
        started.append(start(hold, path, ready, forks))
        child = told.recv()
        children.extend([child] if child else [])
        return started[-1]

    yield start_one
    for child in children:
        os.kill(child, signal.SIGKILL)
    for process in started:
        process.kill()
        process.join()


def names(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


WRITERS = {
    "JsonLines": (lambda place: loops.JsonLines(place / "steps.jsonl"), ".steps.jsonl.lock"),
    "Csv": (lambda place: loops.Csv(place / "steps.csv"), ".steps.csv.lock"),
    "Trace": (lambda place: loops.Trace(place / "trace.arrow"), ".trace.arrow.lock"),
    "Profile": (lambda place: loops.Profile(place), ".lock"),
    "KeepBatches": (lambda place: loops.KeepBatches(place), ".lock"),
    "Checkpoint": (lambda place: loops.Checkpoint(place, every=1, resume=True), ".lock"),
}


def test_another_process_keeps_every_writer_out_until_it_is_killed(tmp_path, elsewhere):
    processes = {}
    for name, (_, file) in WRITERS.items():
        (tmp_path / name).mkdir()
        processes[name] = elsewhere(tmp_path / name / file)
    for name, (make, _) in WRITERS.items():
        loop = looping(make(tmp_path / name))
        said = rf"^{name}\('.*{name}.*'\): another run writes it, that of process {processes[name].pid} on .+, since 2"
        with pytest.raises(loops.NotWritable, match=said):
            loop.run(1)
        assert loop.counters.data == 0
        processes[name].kill()
        processes[name].join()
        loop.run(1)
        assert not list((tmp_path / name).rglob("*.lock"))


def test_a_child_that_outlives_the_process_does_not_keep_the_lock(tmp_path, elsewhere):
    process = elsewhere(tmp_path / ".lock", forks=True)
    with pytest.raises(LockHeld, match=f"process {process.pid} on "):
        Lock(tmp_path / ".lock").take()
    process.kill()
    assert wait_for(lambda: not pathlib.Path(f"/proc/{process.pid}").exists())
    taken = Lock(tmp_path / ".lock")
    taken.take()
    taken.release()


def test_a_program_that_is_started_does_not_keep_the_lock(tmp_path):
    held = Lock(tmp_path / ".lock")
    held.take()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", "input(1)"], close_fds=False, **pipes) as process:
        assert process.stdout.read(1) == b"1"  # While it starts, it still has the files of this process.
        held.forget()  # As the system does when this process dies.
        again = Lock(tmp_path / ".lock")
        again.take()
        again.release()
        process.communicate(b"\n")


def test_a_second_loop_of_the_process_is_refused_while_the_first_one_runs(tmp_path):
    path = tmp_path / "steps.jsonl"
    second = looping(loops.JsonLines(tmp_path / "x" / ".." / "steps.jsonl"))
    with pytest.raises(loops.NotWritable, match="that of this process, since"):
        looping(loops.JsonLines(path), lambda visit: second.run(1)).run(3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]
    other = looping(loops.JsonLines(tmp_path / "other.jsonl"))
    looping(loops.JsonLines(path), lambda visit: other.run(visit.counters.data)).run(3)
    second.run(3)
    assert names(tmp_path) == ["other.jsonl", "steps.jsonl"]


def test_one_loop_writes_much_into_one_folder_and_nothing_twice(tmp_path):
    seen = []
    actions = [loops.JsonLines(tmp_path / "a.jsonl"), loops.Csv(tmp_path / "a.csv"), loops.Profile(tmp_path)]
    actions += [loops.KeepBatches(tmp_path), loops.Checkpoint(tmp_path, every=2)]
    loop = looping(*actions, lambda visit: seen.append(names(tmp_path)))
    loop.run(2)
    loop.run(3)
    assert {".lock", ".a.jsonl.lock", ".a.csv.lock"} <= set(seen[0])
    assert not [name for name in names(tmp_path) if name.endswith(".lock")]
    with pytest.raises(scaler.InvalidArgument, match=r"JsonLines and Csv both write .*: expected a file for each"):
        looping(loops.JsonLines(tmp_path / "b"), loops.Csv(tmp_path / "b")).run(1)


def test_a_lock_that_somebody_removed_is_taken_again_or_ends_the_run(tmp_path):
    path = tmp_path / "steps.jsonl"
    mine = tmp_path / ".steps.jsonl.lock"
    looping(loops.JsonLines(path), lambda visit: mine.unlink(missing_ok=True)).run(3)
    other = Lock(mine)

    def steal(visit):
        mine.unlink()
        other.take()

    with pytest.raises(loops.NotWritable, match="another run writes it"):
        looping(steal, loops.JsonLines(path)).run(3)
    assert mine.exists()
    other.release()


def test_a_folder_that_is_copied_while_it_is_held_stays_held(tmp_path):
    (tmp_path / "run").mkdir()
    held = Lock(tmp_path / "run" / ".lock")
    held.take()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(LockHeld):
        Lock(tmp_path / "run" / ".lock").take()
    Lock(tmp_path / "copy" / ".lock").take()
    held.release()


def test_a_disk_without_locks_says_who_may_be_there(tmp_path, monkeypatch):
    def none(file):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_locks, "_lock", none)
    looping(loops.JsonLines(tmp_path / "steps.jsonl")).run(1)
    said = {"host": "orbit", "pid": 12, "since": "2026-01-01 00:00:00 UTC"}
    (tmp_path / ".steps.jsonl.lock").write_text(json.dumps(said))
    with pytest.warns(UserWarning, match=r"does not support locks \(No locks.*process 12 on orbit, since 2026-01-01"):
        looping(loops.JsonLines(tmp_path / "steps.jsonl")).run(1)
    assert names(tmp_path) == ["steps.jsonl"]


@pytest.mark.parametrize("said", ["", "nonsense", "[1]", '{"host": 1}', "{" * 9999])
def test_a_holder_that_cannot_be_read_is_one_without_a_name(tmp_path, said):
    held = Lock(tmp_path / ".lock")
    held.take()
    (tmp_path / ".lock").write_text(said)
    with pytest.raises(LockHeld, match="an unknown process"):
        Lock(tmp_path / ".lock").take()
    held.release()


def test_devices_and_streams_have_none(tmp_path):
    with RunLocks([("A", Place(pathlib.Path(os.devnull), "file")), ("B", Place(tmp_path / "x", "stream"))]):
        assert not list(tmp_path.iterdir())
        looping(loops.JsonLines(os.devnull)).run(1)
        looping(loops.JsonLines(os.devnull)).run(1)


def test_a_refused_run_leaves_no_folder(tmp_path):
    def refused(loop):
        raise loops.LoopError("no")

    action = loops.Call(print, every=9)
    action.begin = refused
    with pytest.raises(loops.LoopError):
        looping(action, loops.JsonLines(tmp_path / "a" / "b" / "steps.jsonl")).run(1)
    assert not list(tmp_path.iterdir())
