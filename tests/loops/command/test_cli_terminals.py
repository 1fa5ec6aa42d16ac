"""Guards what commands print into terminals of any width, and into pipes, also into one that nobody reads."""

import contextlib
import fcntl
import importlib
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import types

import numpy as np
import pytest
import rich.console

import halfstep as cli
from halfstep import terminal
from halfstep.commands import shared as statuses
from loops.diagnose.doctor.layer_times import FORMATS, SETTINGS
from loops.diagnose.explain.remedies import Kind, Remedy
from loops.diagnose.lint import subject as lint
from loops.diagnose.lint.subject import Finding
from loops.replay.results import Replay, Replayed
from loops.replay.train_again import Live, Side
from loops.replay.tune import Tuned
from loops.support.text import columns
from loops.views.compare import Comparison, Row

NAME = "warmup:100+static:1024+then:500+dynamic:growth_interval=200"
NONE = np.zeros([0])
LIMITS = dict.fromkeys(("at_floor", "at_ceiling"), 0.25)
UNKNOWN = {"may_differ_at": None, "intervals": None, "highest_skip_rate": 0.01234, "may_stall": False}
REPLAYED = Replayed(
    NAME, 1234, 0.01234, 14.98, 65536.0, 0.00123, **LIMITS, uncertain=987, **UNKNOWN, scales=NONE, skipped=NONE
)
SIDE = Side(NAME, 1234, 0.01234, 14.98, 65536.0, 0.54321, None)
ROW = {"accuracy": 0.9871, "difference": -0.3, "final_loss": 0.0123, "skipped": 1.5, "failed": 1}
SHARES = {"flushed_weights": 0.0321, "flushed_activations": 0.0123}
FINDING = Finding(
    f"model/{'block/' * 20}dense",
    "float16 ends here " * 9,
    "1234.5 at 2^10 " * 9,
    "Write it so. " * 9,
    lint.Kind.SHAPES,
)
LONG_ROW = Row(
    f"gradients/{'block_' * 9}dense/kernel", ("float16", "float32"), 99, 17, 41, 1.75, 9.25, (2.5, 3.5), (0.0, 0.0), 0
)


COMPARISON = Comparison(
    runs=("a", "b"),
    by="update",
    steps=99,
    lost=(0, 0),
    batches=(99, 99),
    other_batches_at=None,
    scale_differs_at=3,
    scales_known=True,
    decision_differs_at=4,
    parts_at_steps=(17, 17),
    rows=(LONG_ROW,),
    alone=((), ()),
    settings=(),
    reference="b",
    closer="a",
    sentence="They part.",
    notes=(),
)


TRAINED = {"accuracy": 0.987, "final_loss": 0.25, "applied": 3, "skipped": 1, "loss_scale": 8.0}
TUNED = Tuned(NAME, "dynamic", 36, 0.01, 0.02, 0.03, 0.04, 0.02, None, None, (0.05, 0.06), (0.07, 0.08))
TIMES = {("Dense", name): dict.fromkeys(SETTINGS, 1.25) for name in FORMATS}
REMEDY = Remedy(Kind.BFLOAT16, NAME, True, True, 0.125, "", 64.0, gradients_left=0.99, helps=True)
EXPLAINED = types.SimpleNamespace(sentence="Step 7 was skipped.", remedies=[REMEDY])


def watches(folder, console):
    console.print("step 7", "x" * 200, highlight=False)


def cells(text):
    """The words of a text, whatever lines they stand in."""
    return set(text.split())


COMMANDS = {
    "train": ([("loops.run.train", "train", TRAINED)], ["train", "digits"], "98.7% 0.25 3 1 8"),
    "study": (
        [
            ("loops.study.compare", "run_study", {"setups": [{"name": NAME, **ROW, **SHARES}], "runs": []}),
            ("loops.study.page", "report_study", []),
        ],
        ["lab", "study"],
        f"{NAME} 98.7% (1 failed) -0.3 1.2e-02 1.5 3.2% 1.2%",
    ),
    "report": ([("loops.views.report", "write_report", 1234)], ["report", "run"], "1,234"),
    "replay": (
        [("loops.replay.recording", "tables_of", [("run", None)]), ("loops.replay.recording", "recording_of", None)]
        + [("loops.replay.replay", "replay_recordings", Replay(4321, (REPLAYED,), None, NONE))],
        ["lab", "replay", "run", "--strategy", "dynamic"],
        f"4,321 {NAME} 1,234 1.234% 2^14.98 65536 0.123% 25% 987",
    ),
    "replay --live": (
        [("loops.replay.train_again", "live", Live(40, 60, None, SIDE, (SIDE,)))],
        ["lab", "replay", "run", "--strategy", "dynamic", "--live"],
        f"{NAME} 1,234 2^14.98 65536 0.54321",
    ),
    "compare": (
        [("loops.views.compare.compare", "compare", COMPARISON)],
        ["lab", "compare", "a", "b"],
        f"{LONG_ROW.name} float16 float32 17 41 1.75 9.25 2.5",
    ),
    "tune": (
        [("loops.replay.tune", "tune", TUNED)],
        ["lab", "tune", "run"],
        f"{NAME} 1.0000% 2.0000% 3.0000% 4.0000% 5.0000% 6.0000% 7.0000% 8.0000%",
    ),
    "doctor": ([("loops.diagnose.doctor.layer_times", "measure", TIMES)], ["doctor"], "float16 bfloat16 1.25"),
    "lint": (
        [("loops.support.user_function", "called", None), ("loops.diagnose.lint", "lint_program", [FINDING])],
        ["lint", "--build", "program:make"],
        f"{FINDING.layer} {FINDING.finding} {FINDING.measured} {FINDING.instead}",
    ),
    "explain": (
        [("loops.run.rewind.rewind", "open_run", None), ("loops.diagnose.explain.explain", "explain", EXPLAINED)],
        ["explain", "run"],
        f"7 {NAME} 64, 0.125, 99%",
    ),
    "watch": ([("loops.views.watch", "watch", watches)], ["watch", "run"], "7"),
}
"""Of each command: what its work is replaced by, its arguments, and words that it has to print."""


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ready(monkeypatch):
    """Has a command do nothing but print, and gives its arguments and its words."""

    def prepared(name):
        replaced, arguments, words = COMMANDS[name]
        for module, function, found in replaced:
            where = importlib.import_module(module) if isinstance(module, str) else module
            kept = {"weights_digest": "0"} | found if function == "train" else found
            monkeypatch.setattr(where, function, kept if callable(kept) else lambda *_, kept=kept, **__: kept)
        return arguments, cells(words)

    return prepared


def in_a_terminal(arguments, width):
    """The status of a command in a terminal so wide, and what it prints there."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    with open(inner, "w", encoding="utf-8") as screen, contextlib.redirect_stdout(screen):
        status = cli.main(arguments)
    printed = b""
    with contextlib.suppress(OSError), os.fdopen(outer, "rb", buffering=0) as shown:
        while part := shown.read(4096):
            printed += part
    return status, printed.decode().replace("\r\n", "\n")


@pytest.mark.exhaustive_with("doctor")
@pytest.mark.parametrize("name", COMMANDS)
def test_no_terminal_is_too_narrow_for_a_number(ready, name):
    arguments, words = ready(name)
    for width in (200, 80, 40, 20):
        _, printed = in_a_terminal(arguments, width)
        assert not words - cells(printed), width
        assert "\u2026" not in printed  # Rich's sign for what it cut.
        assert "\x1b" not in printed
        if width == 80 and name not in ("train", "report", "doctor"):  # No row is wrapped.
            tables = [line for line in printed.splitlines() if "x" * 80 not in line and len(line.split()) > 1]
            assert max(map(len, tables)) <= 80 + (len(NAME) if name == "explain" else 0)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_pipe_has_every_row_in_one_line(ready, name, capsys):
    arguments, words = ready(name)
    cli.main(arguments)
    printed = capsys.readouterr().out
    assert not words - cells(printed)
    assert "\x1b" not in printed
    if name in ("replay", "compare", "study", "replay --live"):
        assert any(words - {"4,321"} <= cells(line) | {"(1", "failed)"} for line in printed.splitlines())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_closed_pipe_ends_it_quietly(ready, name, capsys):
    arguments, _ = ready(name)
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w", encoding="utf-8") as pipe, contextlib.redirect_stdout(pipe):
        assert cli.main(arguments) == statuses.EXIT_CLOSED_PIPE == 128 + 13
        print("what comes after it is lost without an error")
    assert capsys.readouterr().err == ""


def test_progress_that_nobody_reads_ends_a_run_quietly(ready, monkeypatch, capsys):
    ready("train")
    reads, writes = os.pipe()
    os.close(reads)

    def prints(*_, **__):
        terminal.progress("digits")._console.print("1/2")

    monkeypatch.setattr(sys.modules["loops.run.train"], "train", prints)
    with open(writes, "w", encoding="utf-8") as pipe, contextlib.redirect_stderr(pipe):
        assert cli.main(["train", "digits"]) == statuses.EXIT_CLOSED_PIPE
        print("lost", file=sys.stderr)
    assert capsys.readouterr().out == ""


def test_a_pipe_of_something_else_is_no_end_without_a_word(ready, monkeypatch, capfd):
    ready("train")

    def fails(*_, **__):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys.modules["loops.run.train"], "train", fails)
    assert cli.main(["train", "digits"]) == statuses.EXIT_ERROR
    assert "Broken pipe" in capfd.readouterr().err


def test_a_full_disk_is_told_of_standard_output(ready, capsys):
    arguments, _ = ready("tune")
    with open("/dev/full", "w", encoding="utf-8") as full, contextlib.redirect_stdout(full):
        assert cli.main(arguments) == statuses.EXIT_ERROR
    assert capsys.readouterr().err == "halfstep: standard output: No space left on device.\n"


def test_a_full_disk_in_the_middle_of_the_output_asks_for_no_other_folder(ready, monkeypatch, capsys):
    arguments, _ = ready("tune")

    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["halfstep.commands.other_strategies"], "_tune", fails)
    assert cli.main(arguments) == statuses.EXIT_ERROR
    said = "halfstep: standard output, or a file that was being written: No space left on device.\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("asked", [["--help"], ["lab", "study", "--help"], ["--version"], ["completion", "bash"]])
def test_a_process_whose_pipe_is_closed_says_nothing(asked):
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "halfstep", *asked]
    # Without a buffer argparse itself drops the error of help that cannot be written, and the status is 0.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open(writes, "wb") as pipe:
        done = subprocess.run(command, env=environment, stdout=pipe, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (statuses.EXIT_CLOSED_PIPE, b"")


def test_no_color_and_a_dumb_terminal_get_none(monkeypatch):
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            text = io.StringIO()
            terminal.Console(file=text, force_terminal=True).print("[red]red[/red]")
            assert "\x1b[31m" not in text.getvalue()


@pytest.mark.parametrize("width", [120, 80, 40])
def test_a_narrow_terminal_cuts_no_number_of_progress(width):
    text = io.StringIO()
    console = terminal.Console(file=text, force_terminal=True, width=width, color_system=None)
    counters = types.SimpleNamespace(data=100, applied=97, skipped=3, known=True)
    outputs = {"loss_scale": [32768.0], "loss": [0.12345]}
    with terminal.Progress("digits", console=console) as progress:
        progress(types.SimpleNamespace(counters=counters, outputs=outputs, seconds=1.0, goal=400))
    assert {"100/400", "97", "3", "32768", "0.1235"} <= cells(text.getvalue())
    assert "\u2026" not in text.getvalue()


@pytest.mark.parametrize(("columns", "width"), [("44", 44), ("0", None), ("wide", None), ("", None)])
def test_columns_overrides_the_width_also_of_a_pipe(monkeypatch, capsys, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal.width() == width


def test_columns_by_room(snapshot):
    rows = [("name", "first", "second"), ("a long name", "1", "22"), ("b", "333", "4")]
    assert [columns(rows, width) for width in (None, 25, 14)] == snapshot
    assert columns(rows, 26) == columns(rows)
    assert columns([("what", "how", "much"), ("x", "y", "3")], left=2) == "what  how  much\nx     y       3"


def test_a_wish_for_colours_makes_no_terminal(monkeypatch, capsys):
    """As in a cell of a notebook that runs a command."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with terminal.working("explain") as show:
        show("ran the step 2 times")
    with terminal.progress("train") as progress:
        assert not progress._console.is_terminal
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_moves_on_a_terminal_and_nothing_is_printed_elsewhere(monkeypatch, is_terminal):
    monkeypatch.setenv("TERM", "xterm")
    text = io.StringIO()
    console = rich.console.Console(file=text, force_terminal=is_terminal, width=100, color_system=None)
    monkeypatch.setattr(terminal, "Console", lambda stderr: console)
    with terminal.working("explain") as show:
        show("ran the step [2] times")
    assert ("explain" in text.getvalue() and "ran the step [2] times" in text.getvalue()) == is_terminal
    assert bool(text.getvalue()) == is_terminal


def test_without_a_bar_long_work_tells_how_far_it_is_every_ten_seconds(monkeypatch, capsys):
    now = iter(range(0, 100, 4))
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(now))
    with terminal.working("cure") as show:
        for times in range(1, 7):
            show(f"ran the step [{times}] times")
    assert capsys.readouterr() == ("", "cure  ran the step [3] times\ncure  ran the step [6] times\n")


@pytest.mark.parametrize("moving", [True, False])
def test_a_bar_wraps_in_no_terminal_and_is_none_in_a_dumb_one(monkeypatch, moving):
    monkeypatch.setenv("TERM", "xterm")
    text = io.StringIO()
    console = terminal.Console(file=text, force_terminal=True, width=30, color_system=None)
    monkeypatch.setattr(terminal, "Console", lambda stderr: console)
    with terminal.working("replay", moving) as show:
        show("replayed 12 of 345 strategies, which is a long line")
    assert "replayed" in text.getvalue()
    assert text.getvalue().count("\n") == 1  # After the bar is gone.
    text.truncate(0)
    monkeypatch.setenv("TERM", "dumb")
    with terminal.working("replay", moving) as show:
        show("not at all")
    assert "not at all" not in text.getvalue()
