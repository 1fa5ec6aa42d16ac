"""Which logs are healthy, and which step of the others to look at."""

import json
import re
import warnings

import numpy as np
import pytest
from recorded_cases import steps_of

from loops.record import skips
from loops.record.log import read_log
from loops.record.reading import as_recorded
from loops.record.skips import in_words, too_often, what_is_wrong
from loops.record.summary import digest, sentence
from loops.views.report import write_report


def health(rows):
    return skips.health(steps_of(rows))


def log(text, cause="OVERFLOW", scale=1024.0):
    """Rows of a run: "." for an applied step, "x" for a skipped one, "m" for a micro-batch."""
    return [
        {
            "step": step,
            "attempted": letter != "m",
            "applied": letter == ".",
            "cause": cause if letter == "x" else None,
            "loss_scale": scale,
        }
        for step, letter in enumerate(text, 1)
    ]


@pytest.mark.parametrize(
    ("text", "healthy", "step"),
    [
        ("." * 20, True, None),
        ("xxxx" + "." * 20, True, 4),
        ("xxxxxxxx" + "." * 20, True, 8),
        ("." * 20 + "x" + "." * 20 + "x" + "." * 10, True, 42),
        ("mxmx" + "m." * 10, True, 4),
        ("xx.x." + "." * 20, True, 4),
        ("." * 30 + "xx", True, 32),
        ("", True, None),
        ("x" * 20, False, 1),
        ("...." + "x" * 8, False, 5),
        ("...xxxxx......", False, 4),
        ("....." * 4 + "xx..x.x.xx..x.x.xx..", False, 37),
    ],
)
def test_a_scale_that_finds_its_level_is_healthy_and_one_that_falls_is_not(text, healthy, step):
    """Skips at the start, one for each growth, and a spike of a few octaves; else the first of what went wrong last."""
    found = health(log(text))
    assert (found.healthy, found.step, found.skips) == (healthy, step, text.count("x"))


def test_a_loss_that_is_not_finite_is_never_calibration():
    """Its first skip is the step, also where other skips follow."""
    rows = log("...x......")
    rows[3]["cause"] = "LOSS"
    assert (health(rows).healthy, health(rows).step) == (False, 4)
    rows = log("xx.x.....xxx......")
    rows[10]["cause"] = "BACKWARD"
    assert health(rows).step == 11


def test_causes_may_be_numbers_or_missing():
    """`Csv` writes numbers, and programs of one's own nothing."""
    rows = log("..x..")
    rows[2]["cause"] = 1
    assert not health(rows).healthy
    rows[2]["cause"] = 3
    assert health(rows).healthy
    del rows[2]["cause"]
    assert health(rows).healthy


def test_spikes_are_counted_by_themselves_and_harm_nobody():
    rows = log("x.....x...x.........")
    rows[6]["cause"] = rows[10]["cause"] = "SPIKE"
    found = health(rows)
    assert (found.healthy, found.spikes, found.step) == (True, 2, 11)
    many = log("." * 30 + "x" * 6)
    for row in many[30:]:
        row["cause"] = "SPIKE"
    assert not health(many).healthy


def test_a_scale_below_one_is_no_level():
    """No healthy gradient of float16 has to be made smaller."""
    assert not health(log("...x....", scale=0.25)).healthy
    assert health(log("...x....", scale=1.0)).healthy


def test_rows_without_a_decision_are_passed_over():
    """A program may log a loss alone."""
    assert health([{"step": 1, "loss": 1.0}]) == health([]).__class__(None, True, 0, 0, 1, last=1)


def cycles(text, scales):
    """Rows of a run with a loss scale for each step."""
    return [{**row, "loss_scale": scale} for row, scale in zip(log(text), scales, strict=True)]


GROWN = cycles("xx" + "....x" * 8, [4096.0, 2048.0] + [1024.0, 1024.0, 1024.0, 1024.0, 2048.0] * 8)
SINKING = cycles(
    "...x" * 8, [scale for level in range(8) for scale in [2.0**-level * 2**20] * 3 + [2.0**-level * 2**21]]
)
OF_EACH_KIND = cycles(
    "x" + "." * 40 + "x" + "." * 38 + "x", [1024.0] + [512.0] * 40 + [512.0] + [256.0] * 37 + [512.0, 512.0]
)


def test_skips_of_each_kind_are_told_apart():
    """One for each growth, which takes the scale back to where it was, is healthy; growth does not explain a fall."""
    found = health(GROWN)
    assert (found.healthy, found.skips, found.at_start, found.of_growth) == (True, 10, 2, 8)
    found = health(SINKING)
    assert (found.healthy, found.of_growth, found.often) == (False, 1, (3, 16))
    # Together they are all skips of the log.
    found = health(OF_EACH_KIND)
    assert (found.healthy, found.at_start, found.of_growth) == (True, 1, 1)


def unseen(text, lost):
    """As `log`, with a loss of null in the steps of these numbers."""
    return [{**row, "loss": None if row["step"] in lost else 1.0} for row in log(text)]


@pytest.mark.parametrize(
    ("text", "lost", "said"),
    [
        ("....", [2, 3], (3, 2, 4)),
        ("xx..", [1, 2, 3, 4], (4, 2, 2)),
        ("mm.mmxmm.", [2, 5], (2, 1, 6)),
    ],
)
def test_a_run_whose_loss_cannot_be_seen_is_not_healthy(text, lost, said):
    """Micro-batches count with their window; a skipped step may have any loss."""
    found = health(unseen(text, lost))
    assert not found.healthy
    assert (found.step, found.unseen, found.moved) == said


def test_the_infinite_loss_of_a_skipped_step_is_no_trouble():
    found = health(unseen("xx..", [1, 2]))
    assert (found.healthy, found.unseen) == (True, 0)
    assert health(log("....")).healthy


RUNS = {
    "the only step": log("."),
    "the only step is skipped": log("x"),
    "no skip": log("...."),
    "one skip": log("x" + "." * 29),
    "two skips": log("xx" + "." * 28),
    "three skips": log("x.....x...x........."),
    "a spike": [{**row, "cause": row["cause"] and "SPIKE"} for row in log("." * 9 + "x.")],
    "after growths": GROWN,
    "too often": SINKING,
    "of each kind": OF_EACH_KIND,
    "a loss unseen": unseen(".x..", [1]),
    "losses of skips unseen": unseen("xx..", [1, 2]),
    "of another loss": [{**row, "loss_scale": 1024.0 if row["applied"] else 64.0} for row in log("." * 9 + "xx...")],
}


def test_sentences(snapshot):
    found = {name: health(rows) for name, rows in RUNS.items()}
    assert {name: [in_words(one), too_often(one), what_is_wrong(one)] for name, one in found.items()} == snapshot


def test_the_later_skips_of_a_streak():
    """Those that a high scale does not explain, if there are any."""
    rows = log("x....xxxx..x.")
    rows[5]["cause"] = "LOSS"
    assert (health(rows).step, health(rows).later) == (6, (7, 8, 9))
    rows[7]["cause"] = "LOSS"
    assert (health(rows).step, health(rows).later) == (6, (8,))
    assert health(log("..xx....")).later == ()


@pytest.mark.parametrize("at_end", [False, True])
def test_skips_at_a_smaller_scale_than_the_steps_around_are_of_another_loss(at_end):
    """A step of several losses logs the largest scale, and after a skip that of the loss which caused it."""
    rows = log("." * 20 + "...xx....." * 4 + ("...x" if at_end else ""))
    for row in rows:
        row["loss_scale"] = 1024.0 if row["applied"] else 64.0
    found = health(rows)
    assert (found.healthy, found.untold, found.skips) == (True, 8 + at_end, 8 + at_end)
    assert not found.sure


def test_a_bad_loss_of_several_is_bad_at_any_scale():
    rows = log("." * 20 + "...x....." * 4, cause="LOSS")
    for row in rows:
        row["loss_scale"] = 1024.0 if row["applied"] else 64.0
    assert (health(rows).healthy, health(rows).untold) == (False, 0)


def _turns(*skipped, last=12):
    """The rows of a step whose part "b" has its turn at every second step, and is skipped at some of them."""
    rows = []
    for step in range(1, last + 1):
        due = step % 2 == 0
        applied = due and step not in skipped
        b = {"b/loss": 1.0 if due else None, "b/attempted": due, "b/applied": applied}
        a = {"a/loss": 1.0, "a/attempted": True, "a/applied": True}
        whole = {"attempted": True, "applied": not due or applied, "loss": 1.0, "loss_scale": 8.0}
        cause = "UPDATE" if due and not applied else None
        rows.append({"step": step, **whole, "cause": cause, **a, **b})
    return rows


def test_the_streak_of_a_part_goes_on_where_it_is_not_its_turn():
    found = health(_turns(6, 8, 10, 12))
    assert (found.healthy, found.step, found.skips, found.moved) == (False, 6, 4, 8)


def test_a_part_that_is_applied_in_between_begins_a_new_streak():
    assert health(_turns(2, 4, 8, 10, 12)).step == 8


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
