"""The explanations that docs/diagnosis.md and docs/explain.md show are what the commands print."""

import importlib
import pathlib
import re
import sys

import keras
import pytest

from halfstep import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("lines")]

ROOT = pathlib.Path(__file__).parents[3]


def blocks(name, kind):
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def without_losses(text):
    """Another machine may round the last digit otherwise."""
    return re.sub(r", loss [-+.e0-9]+(, [0-9]+% of the gradients)?", "", text)


def said(picture):
    """The words and labels of a picture, without its figures' last digits and places."""
    return re.findall(r"<text[^>]*>(.*?)</text>", picture.read_text(encoding="utf-8"), flags=re.DOTALL)


def printed(capsys, command):
    """What a command prints, in which Keras counts its layers from the first on, as in a process of its own."""
    keras.backend.clear_session()
    capsys.readouterr()
    assert main(command.split()[1:]) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_run", None)


@pytest.mark.filterwarnings("ignore::scaler.StuckWarning")
def test_the_explanation_of_a_program(folder, capsys):
    """The program, the command with its picture, and the cure."""
    program, *_ = blocks("docs/explain.md", "python")
    expected, cure = blocks("docs/explain.md", "text")
    (folder / "my_run.py").write_text(program)
    keras.backend.clear_session()
    importlib.import_module("my_run").build(pathlib.Path("run")).run(20)
    commands = [line for block in blocks("docs/explain.md", "sh") for line in block.splitlines()]
    explained, cured = (printed(capsys, line) for line in commands)
    assert without_losses(explained) == without_losses(expected)
    drawn, shown = (path / "overflow.svg" for path in (folder, ROOT / "docs"))
    assert said(drawn) == said(shown), "make pictures draws docs/overflow.svg anew"
    assert cured == cure
