"""Makes the pictures of README and the docs again, and puts them where the pages show them. `make pictures` runs it.

It draws nothing itself: the pictures are what `make study` and the programs and commands on the pages write.
"""

import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import tempfile

import matplotlib
from cycler import cycler

from loops.study.page import report_study
from loops.support.drawing import STYLE, svg_of
from loops.support.palette import BLUE, RED

DOCS = pathlib.Path(__file__).parent
STUDY = DOCS.parent / "study"


def small_loss(folder: pathlib.Path) -> str:
    """What `make study` wrote."""
    report_study(STUDY)
    return (STUDY / "small_loss.svg").read_text(encoding="utf-8")


def strategies(folder: pathlib.Path) -> str:
    """What the study of eight strategies writes, by its command on the page."""
    (command,) = [block for block in blocks("strategies.md", "sh") if "--out eight" in block]
    halfstep(command, folder)
    return (folder / "eight" / "loss_scale.svg").read_text(encoding="utf-8")


def overflow(folder: pathlib.Path) -> str:
    """What `halfstep explain` draws of the program on its page."""
    program, *_ = blocks("explain.md", "python")
    (folder / "my_run.py").write_text(program, encoding="utf-8")
    command, *_ = blocks("explain.md", "sh")
    python(folder, "-c", "import pathlib, my_run; my_run.build(pathlib.Path('run')).run(20)")
    halfstep(command, folder)
    return (folder / "overflow.svg").read_text(encoding="utf-8")


def float16(folder: pathlib.Path) -> str:
    """The figure of the recipe, in the colours of all others."""
    os.chdir(folder)  # It writes its own picture beside itself.
    with matplotlib.rc_context({**STYLE, "axes.prop_cycle": cycler(color=(BLUE, RED), linestyle=("-", (0, (5, 1.5))))}):
        figure = runpy.run_path(str(DOCS / "recipes" / "float16.py"))["axes"].figure
        figure.set_layout_engine("constrained")
        return svg_of(figure)


def blocks(page: str, language: str) -> list[str]:
    """The blocks of a page that are marked as a language."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)```", text, flags=re.MULTILINE | re.DOTALL)


def halfstep(command: str, folder: pathlib.Path) -> None:
    """Runs a command of a page in a folder."""
    python(folder, "-m", "loops", *shlex.split(command.replace("\\\n", " "))[1:])


def python(folder: pathlib.Path, *arguments: str) -> None:
    """Runs this Python in a folder, with the packages beside this file."""
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
    subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, check=True)


DRAWN = {
    "small_loss.svg": small_loss,
    "strategies.svg": strategies,
    "overflow.svg": overflow,
    "recipes/float16.svg": float16,
}
"""The pictures by their places in this folder."""

if __name__ == "__main__":
    for name in sys.argv[1:] or DRAWN:
        with tempfile.TemporaryDirectory() as folder:
            text = DRAWN[name](pathlib.Path(folder))
            os.chdir(DOCS)
        (DOCS / name).write_text(text, encoding="utf-8")
        print(DOCS / name)
