"""`docs/recipes/`: every script is short, runs, and prints what its page shows."""

import doctest
import pathlib
import re
import runpy

import pytest

RECIPES = pathlib.Path(__file__).parent.parent / "docs" / "recipes"
SCRIPTS = sorted(RECIPES.glob("*.py"))
OWN_PROCESS = {"devices"}  # It sets up TensorFlow's devices: tests/distributed/test_recipe_for_devices.py.
LONGEST = 60  # Lines.


@pytest.mark.slow_with("from_orbit", "manual_static", "own_layers", "own_source", "pruning")
@pytest.mark.exhaustive_with(
    "bfloat16",
    "checkpointing",
    "cnn",
    "contrastive",
    "diffusion_ema",
    "embeddings",
    "finetune_transformer",
    "float16",
    "foreign_train_step",
    "from_tf_keras",
    "from_torch_amp",
    "gan",
    "own_train_step",
    "quantisation",
    "reinforcement",
    "transfer",
    "vae",
    "wgan_gp",
)
@pytest.mark.filterwarnings("ignore:TensorBoard is not installed")
@pytest.mark.parametrize(
    "script", [one for one in SCRIPTS if one.stem not in OWN_PROCESS], ids=lambda script: script.stem
)
def test_a_recipe_prints_what_its_page_shows(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    page = script.with_suffix(".md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\n(.*?)```", page, flags=re.MULTILINE | re.DOTALL)
    printed = capsys.readouterr().out
    assert doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS), printed


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_recipe_is_short_and_its_page_names_it(script):
    assert len(script.read_text(encoding="utf-8").splitlines()) < LONGEST
    assert f"]({script.name})" in script.with_suffix(".md").read_text(encoding="utf-8")
