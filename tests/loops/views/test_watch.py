"""Guards what a watcher shows of a run that another process trains, from before its first step until after its end."""

import contextlib
import io
import json
import pathlib
import shutil
import sys

import pytest
import rich.console
import tensorflow as tf
from recorded_cases import write_run

import halfstep as cli
import loops
from loops.views.watch import LiveRun, line, panel, spark, watch

pytestmark = pytest.mark.usefixtures("eagerly")


class Leave(Exception):
    """Ends a watcher that would look for ever."""


def watched(folder, events, *, terminal=False):
    """What a watcher writes while these things happen, one between two looks."""
    output, left = io.StringIO(), list(events)

    def sleep(seconds):
        if not left:
            raise Leave
        left.pop(0)()

    console = rich.console.Console(file=output, force_terminal=terminal, color_system=None, width=100)
    with contextlib.suppress(Leave):
        watch(folder, console, sleep)
    return output.getvalue()


def counting(folder, *actions):
    """The loop of a step that trains nothing, with a log in a folder."""
    data = tf.data.Dataset.range(100)
    log = loops.JsonLines(folder / "steps.jsonl")
    return loops.Loop(
        lambda number: {"loss": tf.cast(number, tf.float32)}, data, steps_per_call=5, actions=[log, *actions]
    )


def ended(printed):
    return "ended" in printed


def rests(looks):
    return [lambda: None] * looks


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("whole"))


def lines_of(whole):
    return (whole / "steps.jsonl").read_bytes().splitlines(keepends=True)


def test_steps_are_read_as_they_come_and_a_torn_line_waits(tmp_path, whole):
    lines = lines_of(whole)
    course = LiveRun(tmp_path)
    assert not course.look()
    assert line(course) == "waiting for the first step"
    with (tmp_path / "steps.jsonl").open("ab", buffering=0) as file:
        file.write(b"".join(lines[:5]) + lines[5][:10])
        assert course.look()
        assert (course.step, course.attempted, course.skips.total(), course.last_skip) == (5, 5, 2, 4)
        assert not course.look()
        file.write(lines[5][10:])
        assert course.look()
    assert (course.step, course.attempted, list(course.losses[""])[-1]) == (6, 6, 0.5)
    assert line(course).startswith("step 6  applied 4  skipped 2  scale 32768  loss 0.5")


def test_a_run_that_resumes_and_cuts_its_log_is_counted_once(tmp_path, whole):
    lines = lines_of(whole)
    (tmp_path / "steps.jsonl").write_bytes(b"".join(lines[:30]))
    course = LiveRun(tmp_path)
    course.look()
    with (tmp_path / "steps.jsonl").open("r+b") as file:
        file.truncate(sum(map(len, lines[:10])))
    course.look()
    assert (course.step, course.attempted) == (10, 10)
    with (tmp_path / "steps.jsonl").open("ab") as file:
        file.writelines(lines[10:40])
    course.look()
    assert (course.step, course.attempted, course.skips.total(), len(course.losses[""])) == (40, 40, 2, 40)
    # It was cut and has grown between two looks, beyond where it ended, with steps that were seen.
    with (tmp_path / "steps.jsonl").open("ab") as file:
        file.writelines(lines[35:50])
    course.look()
    assert (course.step, course.attempted) == (50, 50)


def test_a_trace_is_followed_with_its_headroom(tmp_path, whole):
    data = (whole / "trace.arrow").read_bytes()
    course = LiveRun(tmp_path)
    for end in (10, len(data) // 2, len(data)):
        (tmp_path / "trace.arrow").open("ab").close()
        with (tmp_path / "trace.arrow").open("r+b") as file:
            file.seek(0, 2)
            file.write(data[file.tell() : end])
        course.look()
    assert (course.step, course.attempted, course.skips.total(), len(course.margin)) == (60, 60, 2, 60)
    assert "headroom 12 octaves" in line(course)
    shutil.copy(whole / "steps.jsonl", tmp_path)
    course.look()
    assert (course.step, course.attempted, len(course.margin)) == (60, 60, 60)


@pytest.mark.parametrize("log_first", [True, False])
def test_a_log_of_some_steps_and_a_trace_are_counted_as_one_run(tmp_path, whole, log_first):
    """Whichever file is ahead. Steps 3 and 4 are skipped; the log shows the second of them only."""
    logged = b"".join(line for line in lines_of(whole) if json.loads(line)["step"] % 2 == 0)
    traced = (whole / "trace.arrow").read_bytes()
    files = [(tmp_path / "steps.jsonl", logged), (tmp_path / "trace.arrow", traced)]
    for path, _ in files:
        path.touch()
    course = LiveRun(tmp_path)
    for share in (0.3, 0.5, 0.8, 1.0):
        for path, data in files if log_first else files[::-1]:
            with path.open("ab") as file:
                file.write(data[path.stat().st_size : int(share * len(data))])
            course.look()
    assert (course.step, course.logged, course.attempted) == (60, 60, 60)
    assert (course.skips.total(), course.last_skip, len(course.margin)) == (2, 4, 60)
    assert "skipped 2 of 60" not in line(course)
    (tmp_path / "trace.arrow").write_bytes(traced[: len(traced) // 2])
    course.look()
    assert (course.step, course.skips.total()) == (60, 2)
    assert 30 < course.logged < 60


def test_a_trace_that_another_run_left_is_not_counted(tmp_path, whole):
    """Its steps are ahead of the log's until the log shows that they are of another run."""
    shutil.copy(whole / "trace.arrow", tmp_path)
    course = LiveRun(tmp_path)
    course.look()
    assert course.step == 60
    rows = [json.loads(line) | {"loss": 7.0} for line in lines_of(whole)[:5]]
    (tmp_path / "steps.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    course.look()
    assert (course.step, course.logged, list(course.losses[""]), len(course.margin)) == (5, 5, [7.0] * 5, 0)
    assert line(course).endswith("its trace is of another run, and left out")
    assert "its trace is of another run" in panel(course, "run", 100, blocks=True).plain
    # A new run in this folder has a trace of its own.
    for lines in ([], lines_of(whole), lines_of(whole)):
        (tmp_path / "steps.jsonl").write_bytes(b"".join(lines))
        course.look()
    assert (course.step, course.logged, len(course.margin), course.other_trace) == (60, 60, 60, False)


def test_a_csv_is_followed(tmp_path):
    course = LiveRun(tmp_path)
    with (tmp_path / "steps.csv").open("w") as file:
        for text in ("step,loss\n1,0.5\n", "2,0.2", "5\n3,0.1\n"):
            file.write(text)
            file.flush()
            course.look()
    assert list(course.losses[""]) == [0.5, 0.25, 0.1]


def test_in_a_pipe_there_are_lines_and_one_at_the_end(tmp_path, whole):
    lines = lines_of(whole)

    def begin():
        (tmp_path / "steps.jsonl").write_bytes(b"".join(lines[:20]))

    def finish():
        (tmp_path / "steps.jsonl").write_bytes(b"".join(lines))
        (tmp_path / "summary.json").write_text(json.dumps({"accuracy": 0.5}))

    printed = watched(tmp_path, [begin, *[lambda: None] * 25, finish]).splitlines()
    assert printed[0] == "waiting for the first step"
    assert printed[1].startswith("step 20  ")
    assert printed[2].startswith("step 60  ")
    assert printed[2].endswith("ended, accuracy 50.0%")
    assert len(printed) == 3


def test_it_ends_with_a_program_that_reached_its_goal(tmp_path):
    """Not while a process holds the lock. That of an evaluator beside the run does not matter."""
    counting(tmp_path, loops.Checkpoint(tmp_path / "checkpoints", every=10)).run(10)
    (tmp_path / ".evaluations.jsonl.lock").touch()
    lock = tmp_path / "checkpoints" / ".lock"
    for terminal in (False, True):
        lock.touch()
        assert not ended(watched(tmp_path, rests(100), terminal=terminal))
        printed = watched(tmp_path, [*rests(30), lock.unlink, *rests(2)], terminal=terminal)
        assert ended(printed)
        assert "step 10" in " ".join(printed.split())


def test_a_program_that_was_stopped_may_go_on(tmp_path):
    def interrupt(visit):
        if visit.counters.data == 10:
            raise KeyboardInterrupt

    interrupted = [interrupt, loops.Checkpoint(tmp_path / "checkpoints", every=5, resume=True)]
    with pytest.raises(KeyboardInterrupt):
        counting(tmp_path, *interrupted).run(20)
    assert list((tmp_path / "checkpoints").glob("ckpt-*.index"))
    assert not ended(watched(tmp_path, rests(100)))
    counting(tmp_path, *interrupted[1:]).run(20)
    assert ended(watched(tmp_path, rests(100)))


def test_without_checkpoints_it_ends_when_nothing_holds_a_lock_and_no_step_comes(tmp_path):
    lock = tmp_path / ".steps.jsonl.lock"
    assert not ended(watched(tmp_path, rests(200)))  # Before the first step.
    seen = []
    counting(tmp_path, lambda visit: seen.append(lock.exists())).run(10)
    assert seen
    assert all(seen)
    assert not lock.exists()
    assert ended(watched(tmp_path, rests(60)))
    assert not ended(watched(tmp_path, rests(50)))
    lock.touch()
    assert not ended(watched(tmp_path, rests(200)))


def test_on_a_terminal_it_is_redrawn(tmp_path, whole):
    for name in ("steps.jsonl", "trace.arrow"):
        shutil.copy(whole / name, tmp_path)
    printed = watched(tmp_path, [lambda: (tmp_path / "summary.json").write_text("{}")], terminal=True)
    assert "\x1b[" in printed
    for said in ("loss", "0.05", "loss scale", "32768", "12 octaves", "last at step 4", "ended"):
        assert said in printed


def test_a_watcher_writes_nothing(tmp_path, whole):
    folder = shutil.copytree(whole, tmp_path / "run")
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    watched(folder, [lambda: None])
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before


def test_ctrl_c_is_a_clean_exit(whole, capsys, monkeypatch):
    def interrupted(folder, console):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["loops.views.watch"], "watch", interrupted)
    assert cli.main(["watch", str(whole)]) == 0
    assert capsys.readouterr().err == ""


def test_a_folder_that_is_not_there_is_one_line(tmp_path, capsys):
    assert cli.main(["watch", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_small_curves():
    assert spark([1, 2, 3], 10, blocks=True) == "▁▅█"
    assert spark([5, 5], 10, blocks=False) == "__"
    assert spark([0, float("nan"), 1], 10, blocks=False) == "_ #"
    assert spark([float("nan")], 10, blocks=True) == spark([], 10, blocks=True) == ""
    assert len(spark(range(1000), 40, blocks=True)) == 40


def test_a_quiet_run_says_so(tmp_path, whole):
    seconds = iter([0.0, 1.0, 50.0, 100.0])
    (tmp_path / "steps.jsonl").write_bytes(pathlib.Path(whole / "steps.jsonl").read_bytes())
    course = LiveRun(tmp_path, clock=lambda: next(seconds))
    course.look()
    course.look()
    assert "no new step for 49 seconds" in panel(course, "run", 80, blocks=True).plain
