"""Guards what is said when a disk fails under an action: its name, what it writes, what to do; the rest is saved."""

import contextlib
import errno
import json
import os
import pathlib
import resource
import shutil

import pytest
import rich.console
import tensorflow as tf
from loop_cases import taking as looping

import loops
from loops.loop.state import folder
from loops.record.files import write_json
from loops.support.written import AppendFile

ACTIONS = {
    "JsonLines": lambda place: loops.JsonLines(place / "steps.jsonl"),
    "Csv": lambda place: loops.Csv(place / "steps.csv"),
    "Trace": lambda place: loops.Trace(place / "trace.arrow"),
    "TensorBoard": lambda place: loops.TensorBoard(place, every=1),
    "Profile": lambda place: loops.Profile(place, first=1, steps=4),
    "KeepBatches": lambda place: loops.KeepBatches(place),
    "Checkpoint": lambda place: loops.Checkpoint(place, every=1),
    "Checkpoint, background": lambda place: loops.Checkpoint(place, every=1, background=True),
}


# What a disk does to actions does not depend on who takes the steps.
pytestmark = pytest.mark.usefixtures("tensorboard", "eagerly")


def at(number, do):
    return lambda visit: do() if visit.counters.data == number else None


@contextlib.contextmanager
def full_from(number, size):
    """An action after which no file grows beyond a size, as on a full disk, until the context is left."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield at(number, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1])))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ACTIONS)
def test_a_full_disk_names_the_action_and_the_file(name, tmp_path):
    tf.config.run_functions_eagerly(name != "KeepBatches")  # The graph of a step writes batches.
    with full_from(2, 10) as fill:
        loop = looping(fill, ACTIONS[name](tmp_path / "run"))
        with pytest.raises(loops.LoopError, match=rf"{name}|{tmp_path}") as caught:
            loop.run(6)
    said = str(caught.value)
    assert str(tmp_path / "run") in said
    assert os.strerror(errno.EFBIG) in said
    assert "ake room" in said
    assert "Checkpoint" in name or isinstance(caught.value, loops.NotWritable)
    # It goes on where there is room again.
    loop.run(8)


@pytest.mark.parametrize("name", ["JsonLines", "Csv", "Trace", "TensorBoard", "Checkpoint"])
def test_a_folder_that_is_removed_while_the_run_writes_it_is_an_error(name, tmp_path):
    remove = at(2, lambda: shutil.rmtree(tmp_path / "run"))
    with pytest.raises(loops.NotWritable, match=rf"^{name}\('{tmp_path}.*(No such file|removed or replaced)"):
        looping(remove, ACTIONS[name](tmp_path / "run")).run(6)


def test_a_file_that_is_replaced_while_the_run_writes_it_is_an_error(tmp_path):
    path = tmp_path / "steps.jsonl"

    def replace():
        path.unlink()
        path.touch()

    with pytest.raises(loops.NotWritable, match=r"JsonLines.*removed or replaced while the run wrote it"):
        looping(at(2, replace), loops.JsonLines(path)).run(6)


def test_the_others_have_the_visit_and_the_run_is_saved(tmp_path):
    others = [loops.Csv(tmp_path / "steps.csv"), loops.Checkpoint(tmp_path / "ckpt", every=100, resume=True)]
    with pytest.raises(loops.NotWritable) as caught:
        looping(loops.JsonLines("/dev/full"), *others, steps_per_call=3).run(9)
    assert str(caught.value).startswith(
        "JsonLines('/dev/full'): it cannot be written (No space left on device). Make room, or choose another place. "
        "Steps 1 to 3 are missing there; the other actions have acted."
    )
    assert folder.numbers(tmp_path / "ckpt") == [3]
    assert len((tmp_path / "steps.csv").read_text().splitlines()) == 4
    others = [loops.Csv(tmp_path / "steps.csv"), loops.Checkpoint(tmp_path / "ckpt", every=100, resume=True)]
    loop = looping(loops.JsonLines(tmp_path / "steps.jsonl"), *others, steps_per_call=3)
    with pytest.warns(loops.ResumeWarning, match="has no line of a step before, and the file goes on with step 4"):
        loop.run(9)
    assert [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == [*range(4, 10)]


def test_an_action_whose_end_fails_leaves_the_others_theirs_and_both_errors_are_told(tmp_path):
    def bad(visit):
        raise loops.LoopError("the first one.")

    class Ends:
        writes = loops.JsonLines(tmp_path / "mine").writes

        def __call__(self, visit):
            pass

        def end(self):
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(
        loops.NotWritable, match=r"Ends\('.*mine'\).*Input/output.* Before that: the first one\."
    ) as caught:
        looping(bad, Ends(), loops.Checkpoint(tmp_path / "ckpt", every=100)).run(3)
    assert isinstance(caught.value, OSError)
    assert folder.numbers(tmp_path / "ckpt") == [1]


def test_what_fails_when_an_action_is_left_is_named_and_hides_no_error(tmp_path):
    class Leaves(contextlib.AbstractContextManager):
        writes = loops.JsonLines(tmp_path / "mine").writes

        def __call__(self, visit):
            pass

        def __exit__(self, *exception):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with pytest.raises(loops.NotWritable, match=r"Leaves\('.*mine'\).*quota.*Make room"):
        looping(Leaves()).run(3)
    with pytest.raises(ZeroDivisionError):
        looping(Leaves(), at(2, lambda: 1 / 0)).run(3)


def test_the_error_of_an_action_that_does_not_say_what_it_writes_is_its_own():
    def bad(visit):
        raise ConnectionError("no network")

    with pytest.raises(ConnectionError):
        looping(bad).run(1)


def test_a_console_that_is_full_is_named():
    with contextlib.suppress(OSError), pathlib.Path("/dev/full").open("w", buffering=1) as full:
        progress = loops.Progress(console=rich.console.Console(file=full))
        with pytest.raises(loops.NotWritable, match=r"Progress\('the console'\).*No space left"):
            looping(progress).run(1)


def test_what_cannot_be_cut_off_when_a_run_resumes_is_that_of_its_own_action(tmp_path):
    def loop():
        checkpoint = loops.Checkpoint(tmp_path / "ckpt", every=2, resume=True)
        return looping(checkpoint, loops.JsonLines(tmp_path / "steps.jsonl"))

    loop().run(2)
    (tmp_path / "steps.jsonl").unlink()
    (tmp_path / "steps.jsonl").mkdir()
    with pytest.raises(
        loops.NotWritable, match=r"^JsonLines\('.*steps\.jsonl'\): it cannot be written \(Is a directory"
    ):
        loop().run(4)


def test_a_piece_that_does_not_fit_is_not_there_and_the_next_one_is_whole(tmp_path):
    for end in (0, None):
        file = AppendFile(tmp_path / "file", end)
        file.add(b"whole\n")
        with full_from(0, (tmp_path / "file").stat().st_size + 3) as fill:
            fill(loops.Visit(loops.Counters(), {}, 0.0, 0))
            with pytest.raises(OSError, match="too large"):
                file.add(b"torn\n")
        file.add(b"next\n")
        file.close()
    assert (tmp_path / "file").read_text() == "whole\nnext\n" * 2


def test_a_summary_that_does_not_fit_is_named_and_leaves_nothing(tmp_path):
    with full_from(0, 10) as fill:
        fill(loops.Visit(loops.Counters(), {}, 0.0, 0))
        with pytest.raises(loops.NotWritable, match=r"summary\.json.*Make room"):
            write_json(tmp_path / "summary.json", {"a": "b" * 100})
    assert not list(tmp_path.iterdir())
