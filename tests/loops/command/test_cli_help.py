"""Guards that help, versions, completion and mistakes are answered without TensorFlow, and that they say what is so."""

import functools
import importlib.metadata
import inspect
import json
import pathlib
import pickle
import platform
import re
import shutil
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import loops
import scaler
from halfstep.command import parser, versions
from halfstep.commands import shared
from halfstep.commands.completion import SHELLS, _commands, script
from halfstep.commands.study import STEPS
from loops import tasks
from loops.loop.workers import SECONDS
from loops.replay.tune import GRIDS
from loops.run import strategy_text
from loops.run.train import POLICIES, RunOptions
from loops.study.setups import EMULATED, SETUPS, UNIT_SCALED
from loops.support import signals

HEAVY = ("tensorflow", "keras", "numpy", "scaler", "rich", "jinja2", "matplotlib", "pyarrow")
COMMANDS = ("train", "report", "watch", "explain", "inspect", "doctor", "lint", "completion", "lab")
EXPERIMENTS = ("study", "replay", "tune", "compare", "cure", "observe")
ASKED = [
    ["--help"],
    *([command, "--help"] for command in COMMANDS),
    *(["lab", command, "--help"] for command in EXPERIMENTS),
    ["--version"],
    ["trian"],
    [],
    ["train", "digits", "--stpes", "3"],
    ["train", "digits", "--steps", "0"],
    ["completion", "bash"],
    ["completion", "zsh"],
    ["completion", "fish"],
    ["completion", "tcsh"],
]

_ANSWERS = """
import contextlib, io, json, sys
import halfstep

answers = []
for asked in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = halfstep.main(asked)
        except SystemExit as exit:
            status = exit.code
    answers.append((status or 0, out.getvalue(), err.getvalue()))
print(json.dumps([answers, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


@functools.cache
def answered():
    """The status, output and errors of everything asked in one process, and the modules it had imported in the end."""
    command = [sys.executable, "-c", _ANSWERS, json.dumps(ASKED)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert result.stderr == ""  # No log of TensorFlow's.
    answers, modules = json.loads(result.stdout)
    return {tuple(asked): tuple(answer) for asked, answer in zip(ASKED, answers, strict=True)}, modules


def test_nothing_heavy_is_imported_to_answer():
    answers, modules = answered()
    assert sorted(set(HEAVY) & set(modules)) == []
    for asked, (status, out, err) in answers.items():
        right = asked[-1:] in (("--help",), ("--version",), ("bash",), ("zsh",), ("fish",))
        assert status == (0 if right else 2), asked
        assert bool(out) == right, asked
        assert bool(err) != right, asked


def test_every_command_has_help_and_a_function_that_runs_it():
    answers, _ = answered()
    parsers = _commands(parser())
    for group, commands in (((), COMMANDS), (("lab",), EXPERIMENTS)):
        for command in commands:
            assert re.search(rf"^    {command}\b", answers[(*group, "--help")][1], re.MULTILINE)
            called = " ".join((*group, command))
            assert answers[(*group, command, "--help")][1].startswith(f"usage: halfstep {called}")
            assert command == "lab" or callable(parsers[command].get_default("run"))


def test_help_names_what_there_is():
    presets = [name for name in scaler.presets.__all__ if not name.endswith("_stuck")]
    assert shared.PRESETS == tuple(presets) == tuple(strategy_text._PRESETS)
    assert tuple(strategy_text._STRATEGIES) == shared.STRATEGIES
    assert strategy_text.FORMS == shared.FORMS
    assert tuple(tasks._TASKS) == shared.TASKS
    assert tasks.IMAGE_TASKS == shared.IMAGE_TASKS
    assert tuple(setup.name for setup in SETUPS) == shared.SETUPS
    assert tuple(setup.name for setup in EMULATED) == shared.EMULATED
    assert tuple(setup.name for setup in UNIT_SCALED) == shared.UNIT_SCALED
    assert tuple(GRIDS) == shared.TUNED
    assert POLICIES == shared.POLICIES


def test_defaults_are_those_of_what_runs():
    options = parser().parse_args(["train", "digits"])
    assert options.wait == SECONDS
    RunOptions(options.policy, options.strategy, options.steps, options.seed)
    assert f"default: {STEPS})" in " ".join(answered()[0]["lab", "study", "--help"][1].split())


def test_versions_are_those_of_what_is_imported(monkeypatch):
    said = answered()[0]["--version",][1]
    assert said == f"{versions()}\n"
    assert f"TensorFlow {tf.__version__}, Keras {keras.__version__}, Python {platform.python_version()}" in said
    installed = {"tensorflow-cpu": "2.19", "keras": "3.9"}

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"tensorflow": ["tensorflow-cpu"]})
    assert versions().startswith("halfstep not installed (TensorFlow 2.19, Keras 3.9, ")


def test_a_mistake_is_one_line_after_the_usage():
    for asked in (("trian",), ("train", "digits", "--stpes", "3"), ("completion", "tcsh")):
        assert answered()[0][asked][2].splitlines()[-1].startswith("halfstep"), asked
    assert "'trian'" in answered()[0]["trian",][2]


def completed(*words, place="/"):
    """What bash offers for the last word, in a folder."""
    asked = " ".join(f"'{word}'" for word in ("halfstep", *words))
    shown = f'COMP_WORDS=({asked}) COMP_CWORD={len(words)}\n_shtab_halfstep\necho "${{COMPREPLY[@]}}"'
    command = ["bash", "-c", f"{script(parser(), 'bash')}\n{shown}"]
    result = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, check=True)
    assert result.stderr == ""
    return result.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tr"], ["train"]),
        (["re"], ["report"]),
        (["lab", "re"], ["replay"]),
        (["--v"], ["--version"]),
        (["train", "d"], ["digits"]),
        (["train", "digits", "--s"], ["--strategy", "--steps", "--seed"]),
        (["train", "digits", "--policy", "mixed"], ["mixed_float16", "mixed_bfloat16"]),
        (["lab", "study", "--strategy", "none", "--strategy", "headr"], ["headroom"]),
        (["lab", "tune", "run", "--strategy", "pytor"], []),
        (["train", "digits", "--steps", ""], []),
        (["train", "--out", "study", ""], ["digits", "mnist", "text"]),
        (["train", "digits", "--out", "study", ""], []),
        (["completion", ""], ["bash", "zsh", "fish"]),
    ],
)
def test_bash_completes(words, offered):
    assert sorted(completed(*words)) == sorted(offered)


@pytest.mark.parametrize("words", [["train", "digits", "--out", ""], ["report", ""], ["explain", "--build", ""]])
def test_bash_offers_files_where_no_names_are_known(words, tmp_path):
    (tmp_path / "a_run").mkdir()
    assert completed(*words, place=tmp_path) == ["a_run"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_the_same_words(shell):
    written = script(parser(), shell)
    for word in (
        *COMMANDS,
        *EXPERIMENTS,
        *shared.POLICIES,
        *shared.SETUPS,
        *shared.EMULATED,
        *shared.UNIT_SCALED,
        *shared.PRESETS,
    ):
        assert re.search(rf"\b{word}\b", written), word
    if shutil.which(shell):
        result = subprocess.run([shell, "-n"], input=written, capture_output=True, text=True, timeout=60, check=True)
        assert result.stderr == ""


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes():
    for typed, offered in (("halfstep tr", ["train"]), ("halfstep lab tune run --strategy del", ["delayed_amax"])):
        command = ["fish", "-c", f"{script(parser(), 'fish')}\ncomplete -C '{typed}'"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert [line.split("\t")[0] for line in result.stdout.splitlines()] == offered


def test_public_names_are_there_for_all_who_ask():
    assert set(loops.__all__) <= set(dir(loops))
    found = {}
    exec("from loops import *", found)
    assert set(loops.__all__) <= set(found)
    assert pickle.loads(pickle.dumps(loops.Seconds(2.0))) == loops.Seconds(2.0)
    assert inspect.getsource(loops.Loop).startswith("class Loop")


def table(heading):
    """The rows of the first table of docs/commands.md below a heading."""
    page = (pathlib.Path(__file__).parents[3] / "docs" / "commands.md").read_text(encoding="utf-8")
    rows = re.search(rf"^{heading}\n.*?\n((?:\|[^\n]*\n)+)", page, re.MULTILINE | re.DOTALL).group(1).splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def test_the_page_of_commands_has_each_in_a_line_that_is_understood():
    said = [re.match(r"`halfstep (.*)`$", row[0]).group(1) for row in table("# The command `halfstep`")]
    assert list(dict.fromkeys(line.split()[0] for line in said)) == [*COMMANDS, "--version"]
    for line in said[:-1]:
        words = line.replace("...", "").replace(" N", " 3").replace("SHELL", "bash").replace("[", "").replace("]", "")
        assert parser().parse_args(words.split()).command == line.removeprefix("lab ").split()[0]


def test_the_page_of_commands_has_every_status():
    numbers = {value for name, value in vars(shared).items() if name.startswith("EXIT_")}
    assert [int(row[0]) for row in table("## Exit statuses")] == sorted(numbers)
    assert shared.EXIT_INTERRUPTED == signals.EXIT_INTERRUPTED
    assert shared.EXIT_TERMINATED == signals.EXIT_TERMINATED
