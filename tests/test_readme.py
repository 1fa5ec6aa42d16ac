"""The README's step is that of `docs/getting_started.md`: float32 and five lines."""

import os
import pathlib
import re
import runpy
import sys

import pytest
import tensorflow as tf
from markdown_blocks import python_blocks, run_blocks, text_blocks
from processes import start

import halfstep
import scaler

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
START = (ROOT / "docs" / "getting_started.md").read_text(encoding="utf-8")
_, PLAIN, SCALED, *_ = python_blocks(START)


@pytest.mark.slow
@pytest.mark.usefixtures("as_graphs")
def test_the_first_page_runs_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_blocks(START, tmp_path)
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == 300
    assert names["loop"].counters.attempted == 75
    assert capsys.readouterr().out == "".join(text_blocks(START))


def long(text):
    """The text with the names as `scaler` has them."""
    names = "|".join(name for name in halfstep.__all__ if name in scaler.__all__)
    return re.sub(rf"\bhs\.({names})\b", r"scaler.\1", text)


def test_the_readme_shows_that_step_and_the_lines_for_keras():
    step, _, keras_lines = python_blocks(README)
    assert step == SCALED
    assert [line for line in keras_lines.splitlines() if "model.compile(" not in line] == [
        "hs.protect(model)  # a skipped step also rolls back BatchNorm, seed generators and metrics"
    ]
    page = (ROOT / "docs" / "keras.md").read_text(encoding="utf-8")
    wrapped = "hs.LossScaleOptimizer(keras.optimizers.Adam(1e-3), hs.Dynamic())"
    assert wrapped in keras_lines
    assert wrapped in page
    assert len(README.splitlines()) < 120


def run_program(place):
    os.chdir(place)
    runpy.run_path("my_run.py", run_name="__main__")


@pytest.mark.slow
def test_the_readme_and_the_commands_below_it_work_as_they_stand(tmp_path, monkeypatch, capsys):
    """In an empty folder, as for a reader who saved both blocks: the program in a process of its own."""
    (tmp_path / "my_run.py").write_text("\n".join(python_blocks(README)[:2]), encoding="utf-8")
    process = start(run_program, tmp_path)
    process.join(240)
    assert process.exitcode == 0
    monkeypatch.chdir(tmp_path)
    # The run is over: the same program takes no further step.
    names = run_blocks(README, tmp_path, "__main__")
    counters = names["loss_scaler"].counters
    assert (counters.attempted, counters.attempted - counters.applied < 5) == (300, True)
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == 300
    x, y = tf.random.stateless_normal((8, 64), (1, 2)), tf.range(8)
    assert names["train_step"](x, y)["applied"]
    assert names["loss_scaler"].counters.applied == counters.applied + 1
    names["model"].fit(x, y, verbose=0)
    assert names["model"].optimizer.loss_scaler.counters.applied == 1

    report, explain = re.findall(r"`halfstep ((?:report|explain) run[^`]*)`", README)
    # A step before the first checkpoint needs the seeds.
    for arguments, said in (((), "Nothing is wrong: none of the 300 steps"), (("--step", "50"), "Step 50 was applied")):
        capsys.readouterr()
        assert halfstep.main([*explain.split(), *arguments]) == 0
        assert capsys.readouterr().out.startswith(said)
        del sys.modules["my_run"]  # Each takes the program as a new process does; other tests have some of this name.
    assert halfstep.main(report.split()) == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "300 steps" in page
    assert "strategy</th><td>Dynamic()</td>" in page


def test_the_start_page_shows_the_lines_of_that_step():
    (shown,) = python_blocks((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    assert long(SCALED).endswith(long(shown))


def test_the_two_steps_differ_by_five_lines():
    kept = {line.split("#")[0].strip() for line in SCALED.splitlines()}
    removed = [line.strip() for line in PLAIN.splitlines() if line.strip() and line.strip() not in kept]
    assert len(re.findall(r"# \d$", SCALED, flags=re.MULTILINE)) == 5
    assert len(removed) <= 5, removed


def test_the_links_of_the_readme_lead_somewhere():
    """Those of the pages are followed by `make docs`."""
    places = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(places) > 25
    assert [place for place in places if not (ROOT / place).exists()] == []
