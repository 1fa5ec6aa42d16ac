"""The explanations that docs/diagnosis.md and docs/explain.md show are what the commands print."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

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


# Of several commands, one after the other, in a process that imports TensorFlow once.
COMMANDS = """
import json, sys
import keras
from halfstep import main
for arguments in json.loads(sys.argv[1]):
    keras.backend.clear_session()
    if isinstance(arguments, str):
        exec(arguments)
    else:
        assert main(arguments) == 0
    print(chr(0), end="", flush=True)
"""


def printed(folder, *commands):
    """What each command prints, or lines of Python do."""
    # On processors with float16 instructions oneDNN adds float16 products in another way, and NaNs begin elsewhere.
    alike = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment = {**os.environ, **alike, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split("\0")[:-1]


@pytest.mark.exhaustive
def test_the_first_explanation(tmp_path):
    """Both commands, as they stand there."""
    (commands,) = [block for block in blocks("docs/diagnosis.md", "sh") if "halfstep explain pinned" in block]
    (expected,) = [block for block in blocks("docs/diagnosis.md", "text") if block.startswith("Step 1 was skipped")]
    _, explained = printed(tmp_path, *(line.split()[1:] for line in commands.splitlines()))
    assert without_losses(explained) == without_losses(expected)


def test_the_explanation_of_a_program(tmp_path):
    """The program, the command with its picture, and the cure."""
    program, *_ = blocks("docs/explain.md", "python")
    expected, cure = blocks("docs/explain.md", "text")
    (tmp_path / "my_run.py").write_text(program)
    run = "import pathlib, my_run; my_run.build(pathlib.Path('run')).run(20)"
    commands = [line.split()[1:] for block in blocks("docs/explain.md", "sh") for line in block.splitlines()]
    _, explained, cured = printed(tmp_path, run, *commands)
    assert without_losses(explained) == without_losses(expected)
    drawn, shown = (path / "overflow.svg" for path in (tmp_path, ROOT / "docs"))
    assert said(drawn) == said(shown), "make pictures draws docs/overflow.svg anew"
    assert cured == cure
