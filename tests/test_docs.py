"""What `docs/` shows is true: its Python blocks run, in order, as one program."""

import pathlib
import re

from markdown_blocks import python_blocks, run_blocks

import scaler

DOCS = pathlib.Path(__file__).parent.parent / "docs"
STRATEGIES = (DOCS / "strategies.md").read_text(encoding="utf-8")


def test_the_strategy_that_is_written_on_the_way_works(tmp_path):
    assert len(python_blocks(STRATEGIES)) >= 5
    names = run_blocks(STRATEGIES, tmp_path)
    (shown,) = re.findall(r"^```text\n(.*?)```", STRATEGIES, flags=re.MULTILINE | re.DOTALL)
    assert names["complaint"].split() == shown.split()
    assert names["loss_scaler"].loss_scale == 2.0**15


def test_every_strategy_is_in_the_table():
    named = set(re.findall(r"`(\w+)\(", STRATEGIES.split("## One of your own")[0]))
    kinds = {name for name in scaler.__all__ if hasattr(getattr(scaler, name), "update")} - {"LossScaler", "Strategy"}
    assert kinds <= named | {"LossScaleOptimizer"}, kinds - named


def test_the_layerwise_steps_work(tmp_path):
    names = run_blocks((DOCS / "layerwise.md").read_text(encoding="utf-8"), tmp_path)
    assert names["loss_scaler"].counters.skipped == 0
    assert "also goes to layer 'block'" in names["complaint"]


def test_the_update_modes_do_what_is_said_of_them(tmp_path):
    text = (pathlib.Path(__file__).parent.parent / "docs" / "update_modes.md").read_text(encoding="utf-8")
    assert run_blocks(text, tmp_path)["swallowed"] > 0.5


def test_the_page_for_keras_does_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_blocks((DOCS / "keras.md").read_text(encoding="utf-8"), tmp_path)
    assert (tmp_path / "model.keras").exists()
    assert names["loaded"].optimizer.loss_scaler.counters.attempted == 18
    printed = capsys.readouterr().out
    assert "The step was skipped because the loss itself was not finite" in printed
    assert "Constant(loss_scale=64.0)" in printed
