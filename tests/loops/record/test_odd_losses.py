"""Guards that a loss that is text, or too large to be summed, is not told as one that is not finite."""

import json
import re
import warnings

import numpy as np
import pytest

from loops.record.log import read_log
from loops.record.reading import as_recorded
from loops.record.summary import digest, sentence
from loops.views.report import write_report


def a_log(path, losses, comma=False):
    if comma:
        lines = ["step,loss,applied,loss_scale", *(f"{step},{one},1,8" for step, one in enumerate(losses, 1))]
    else:
        rows = ({"step": n, "loss": one, "applied": True, "loss_scale": 8.0} for n, one in enumerate(losses, 1))
        lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("losses", [[1e308] * 90, [-1e308] * 45 + [1e308] * 45, [1.7e308, 1e-300] * 20, [1.79e308] * 9])
def test_a_huge_loss_is_finite(tmp_path, losses):
    log = a_log(tmp_path / "steps.jsonl", losses)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = as_recorded(log)
        assert f"the loss went from {losses[0]:.3g} to " in sentence(found, digest(found))
        write_report([log], tmp_path / "report.html")
    paths = re.findall(r' (?:d|points)="([^"]*)"', (tmp_path / "report.html").read_text())
    assert paths
    assert not any("nan" in path or "inf" in path for path in paths)
    last = losses[-max(1, len(losses) // 10) :]
    assert digest(found).final_loss == pytest.approx(sum(one / len(last) for one in last))


@pytest.mark.parametrize("comma", [False, True])
@pytest.mark.parametrize("at", [0, 5, 29])
def test_a_loss_that_is_text_is_named_with_its_line(tmp_path, comma, at):
    losses = [0.5] * 30
    losses[at] = "low"
    log = a_log(tmp_path / ("steps.csv" if comma else "steps.jsonl"), losses, comma)
    found = as_recorded(log)
    line = at + 1 + comma
    assert f"{log.name}: line {line} has the text 'low' as its loss, not a number: the column is left out." in " ".join(
        found.notes
    )
    assert "not finite" not in sentence(found, digest(found))
    assert digest(found).health.healthy
    np.testing.assert_array_equal(found.column("loss_scale"), 8.0)
    write_report([log], tmp_path / "report.html")
    assert f"line {line} has the text" in (tmp_path / "report.html").read_text()


def test_rows_have_no_text_where_a_number_belongs(tmp_path):
    rows = read_log(a_log(tmp_path / "steps.jsonl", [0.5, "0.25", None]))
    assert [row.get("loss", "missing") for row in rows] == [0.5, "missing", None]
