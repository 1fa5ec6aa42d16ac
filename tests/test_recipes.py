"""`docs/recipes/`: every script is short, runs, and prints what its page shows."""

import ast
import doctest
import inspect
import pathlib
import runpy
import sys

import mlflow_stand_in
import pytest
from markdown_blocks import text_blocks

RECIPES = pathlib.Path(__file__).parent.parent / "docs" / "recipes"
SCRIPTS = sorted(RECIPES.glob("*.py"))
OWN_PROCESS = {"devices"}  # It sets up TensorFlow's devices: tests/distributed/test_recipe_for_devices.py.
LONGEST = 30  # Lines of code, beside imports and docstrings.


EXHAUSTIVE = [
    *("bfloat16", "checkpointing", "cnn", "contrastive", "diffusion_ema", "embeddings", "finetune_transformer"),
    *("float16", "foreign_train_step", "from_tf_keras", "from_torch_amp", "gan", "own_train_step", "quantisation"),
    *("reinforcement", "transfer", "vae", "wgan_gp"),
]


@pytest.mark.slow_with(*(one.stem for one in SCRIPTS if one.stem not in {"by_hand", *OWN_PROCESS, *EXHAUSTIVE}))
@pytest.mark.exhaustive_with(*EXHAUSTIVE)
@pytest.mark.filterwarnings("ignore:TensorBoard is not installed")
@pytest.mark.usefixtures("as_graphs")
@pytest.mark.parametrize(
    "script", [one for one in SCRIPTS if one.stem not in OWN_PROCESS], ids=lambda script: script.stem
)
def test_a_recipe_prints_what_its_page_shows(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow_stand_in)
    runpy.run_path(str(script), run_name="__main__")
    page = script.with_suffix(".md").read_text(encoding="utf-8")
    (shown,) = text_blocks(page)
    printed = capsys.readouterr().out
    assert doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS), printed


def lines_of_code(text):
    """The lines that are neither blank, comments, docstrings nor imports."""
    passed = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
            passed |= set(range(node.lineno, node.end_lineno + 1))
    lines = [line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in passed]
    return len([line for line in lines if line and not line.startswith("#")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_recipe_is_short_and_its_page_names_it(script):
    assert lines_of_code(script.read_text(encoding="utf-8")) <= LONGEST
    assert f"]({script.name})" in script.with_suffix(".md").read_text(encoding="utf-8")


def test_the_stand_in_takes_what_mlflow_takes():
    real = pytest.importorskip("mlflow")
    for name in mlflow_stand_in.__all__:
        own, known = (inspect.signature(getattr(one, name)).parameters for one in (mlflow_stand_in, real))
        assert [parameter for parameter in own if parameter not in known] == [], name
        assert list(own)[:2] == list(known)[: len(list(own)[:2])], name
