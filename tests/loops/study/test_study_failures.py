"""Guards a study in which a run fails: the others run, the failure is told everywhere, and a script sees it."""

import pytest
import tensorflow as tf
from command_cases import run

import scaler
from halfstep.commands.study import exit_status
from loops import tasks
from loops.study import compare, setups
from loops.study.setups import Setup
from loops.support.errors import LoopError

pytestmark = pytest.mark.usefixtures("small_digits")

GOOD, BAD = "static:1024", "static:2**100"


@pytest.fixture
def failing(monkeypatch):
    """Has runs with the strategy BAD end with an error before their first step; set `.error`."""
    real = compare.train

    class Train:
        error: BaseException = scaler.StuckError("It is stuck.")
        strategies = (BAD,)

        def __call__(self, task, options, out, actions, **built):
            if options.strategy in self.strategies:
                actions(task.model(options.policy))
                raise self.error
            return real(task, options, out, actions, **built)

    train = Train()
    monkeypatch.setattr(compare, "train", train)
    return train


def study(capsys, out, *strategies, json_too=False):
    words = [word for text in strategies for word in ("--strategy", text)]
    return run(
        capsys, "lab", "study", *words, "--steps", 2, "--seeds", 1, "--out", out, *(["--json"] if json_too else [])
    )


@pytest.mark.slow
def test_a_study_in_which_all_fail_has_a_report_and_status_1(capsys, tmp_path, failing):
    failing.strategies = ("none", BAD)
    status, printed, errors = study(capsys, tmp_path, BAD)
    assert status == 1
    assert "wrote" in printed
    assert errors.count("halfstep: ") == 2
    assert "No run on digits finished." in (tmp_path / "report.html").read_text()


GRAPH = """Graph execution error:

Detected at node add defined at (most recent call last):
  File "a.py", line 1
out of memory: [64]
\t [[{{node add}}]] [Op:__inference_step_1]"""
TRACED = """in user code:

    File "a.py", line 3, in step  *
        raise scaler.InvalidArgument("no loss")

    InvalidArgument: expected a loss.
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (scaler.InvalidArgument("static: too high."), "InvalidArgument: static: too high."),
        (scaler.InvalidArgument(TRACED), "InvalidArgument: expected a loss. (at a.py, line 3)"),
        (LoopError("One line\nand another."), "LoopError: One line and another."),
        (ValueError(), "ValueError: "),
        (tf.errors.ResourceExhaustedError(None, None, GRAPH), "ResourceExhaustedError: out of memory: [64]"),
    ],
)
def test_any_error_of_a_run_is_told_in_one_line(small, tmp_path, failing, error, said):
    failing.error = error
    (run,) = compare.run_study(small, [Setup("bad", "bad", "mixed_float16", BAD)], steps=2, seeds=1, out=tmp_path)[
        "runs"
    ]
    assert setups.failure(run) == f"bad seed 0 failed before its first step: {said}"


def unwritable():
    error = LoopError("the folder cannot be written")
    error.__cause__ = PermissionError(13, "Permission denied", "/x")
    return error


@pytest.mark.parametrize(
    ("error", "status"), [(OSError(28, "No space left", "/x"), 1), (unwritable(), 1), (KeyboardInterrupt(), 130)]
)
def test_what_concerns_all_runs_stops_at_once(capsys, tmp_path, failing, error, status):
    failing.error, failing.strategies = error, ("none",)
    assert study(capsys, tmp_path, BAD)[0] == status
    assert not (tmp_path / "summary.json").exists()


def test_a_run_that_fails_leaves_nothing_of_an_older_one(small, tmp_path, failing):
    folder = tmp_path / "runs" / "bad-seed0"
    folder.mkdir(parents=True)
    for name in ("steps.jsonl", "summary.json"):
        (folder / name).write_text("of an older study")
    compare.run_study(small, [Setup("bad", "bad", "mixed_float16", BAD)], steps=2, seeds=1, out=tmp_path)
    assert list(folder.iterdir()) == []


def test_the_help_names_each_status_and_the_tasks(capsys):
    status, printed, _ = run(capsys, "lab", "study", "--help")
    words = " ".join(printed.split())
    assert status == 0
    assert "0 if all runs finished, 3 if some failed, 1 if none of what was compared finished" in words
    assert "digits or mnist, the tasks of images" in words


@pytest.mark.parametrize("name", ["text", "cifar"])
def test_a_task_that_cannot_be_studied_is_refused_with_those_that_can(capsys, tmp_path, name):
    status, printed, errors = run(capsys, "lab", "study", name, "--out", tmp_path / "out")
    assert (status, printed) == (2, "")
    assert errors.startswith(f"halfstep: study {name!r}: expected one of digits, mnist. ")
    assert errors.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_task_without_images_is_refused_before_anything_runs():
    with pytest.raises(scaler.InvalidArgument, match=r"run_study.*'text'.*expected a loops.tasks.ImageTask"):
        compare.run_study(tasks.load("text"), [], steps=1, seeds=1, out="unused")


def test_exit_statuses():
    def summary(*runs):
        return {"runs": [{"setup": name, **({} if fine else {"error": {}})} for name, fine in runs]}

    assert exit_status(summary(("float32", True), ("a", True))) == 0
    assert exit_status(summary(("float32", True), ("a", True), ("a", False))) == 3
    assert exit_status(summary(("float32", False), ("a", True))) == 3
    assert exit_status(summary(("float32", True), ("a", False))) == 1
    assert exit_status(summary(("float32", False))) == 1
