"""Guards that what a release wrote is read for ever: its checkpoints resume, its traces and logs make reports.

`tests/data/keep.py` made the files, each release's once.
"""

import json
import pathlib
import shutil
import sys

import keras
import numpy as np
import pytest

import loops
from halfstep import main
from loops.loop.state import folder
from loops.record.trace import file, stream

DATA = pathlib.Path(__file__).parent / "data"
RELEASES = sorted(path.name for path in DATA.iterdir() if path.is_dir() and path.name[0].isdigit())
FURTHER = 4
sys.path.insert(0, str(DATA))
keep = __import__("keep")


@pytest.fixture(params=RELEASES)
def kept(request, tmp_path, monkeypatch):
    """The files of a release in a working folder of their own."""
    shutil.copytree(DATA / request.param, tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    return tmp_path / "run"


def logged(place):
    return [json.loads(line) for line in (place / "steps.jsonl").read_text().splitlines()]


def test_the_first_release_is_there():
    assert "0.3.0" in RELEASES
    assert folder.FORMAT in folder.READ
    page = (DATA.parents[1] / "docs" / "stability.md").read_text(encoding="utf-8")
    assert f"that of a checkpoint is {folder.FORMAT}, that of a trace {stream.VERSION}." in " ".join(page.split())


def test_a_kept_checkpoint_says_what_it_holds(kept):
    found = folder.read_facts(folder.prefix(kept / "checkpoints", keep.STEPS))
    assert found["format"] in folder.READ
    assert found["counters"]["attempted"] == keep.STEPS
    assert main(["inspect", "checkpoints"]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("as_graphs")
def test_a_kept_checkpoint_resumes(kept, tmp_path, monkeypatch):
    before = logged(kept)
    loop = keep.make_loop()
    counters = loop.run(keep.STEPS + FURTHER)
    after = logged(kept)
    assert (counters.attempted, counters.data) == (keep.STEPS + FURTHER, keep.STEPS + FURTHER)
    assert counters.applied == sum(line["applied"] for line in after)
    assert after[: keep.STEPS] == before
    trace = loops.observe.read("trace.arrow").steps.to_pydict()
    assert trace["step"] == [line["step"] for line in after] == list(range(1, keep.STEPS + FURTHER + 1))
    # A run of today that was never stopped goes the same way, but for the rounding of another version or machine.
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    keras.backend.clear_session()
    keep.make_loop().run(keep.STEPS + FURTHER)
    whole = logged(tmp_path / "whole")
    for name in ("applied", "loss_scale"):
        assert [line[name] for line in after] == [line[name] for line in whole]
    np.testing.assert_allclose([line["loss"] for line in after], [line["loss"] for line in whole], rtol=0.01)


def test_a_kept_trace_and_log_are_read(kept):
    trace = loops.observe.read("trace.arrow")
    lines = logged(kept)
    found = trace.steps.to_pydict()
    assert found["step"] == [line["step"] for line in lines] == list(range(1, keep.STEPS + 1))
    for name in ("loss", "loss_scale", "applied", "cause"):
        assert found[name] == [line[name] for line in lines], name
    assert any(not applied for applied in found["applied"])
    assert len(trace.tensors) > 10
    assert len(trace.histograms) > 10


def test_a_kept_run_makes_a_report(kept, capsys):
    assert main(["report", str(kept), "--out", "report.html"]) == 0
    page = (kept / "report.html").read_text(encoding="utf-8")
    skipped = sum(not line["applied"] for line in logged(kept))
    assert f"{keep.STEPS} steps, {skipped} skipped" in page


def test_a_format_of_the_future_is_refused_by_name(kept, monkeypatch):
    monkeypatch.setattr(folder, "READ", (99,))
    with pytest.raises(folder.Damaged, match=r"its format is 3, and this version reads 99"):
        folder.read_facts(folder.prefix(kept / "checkpoints", keep.STEPS))
    for reader in (file, stream):
        monkeypatch.setattr(reader, "VERSION", "99")
    with pytest.raises(loops.LoopError, match=r"its format is 1\."):
        loops.observe.read("trace.arrow")
