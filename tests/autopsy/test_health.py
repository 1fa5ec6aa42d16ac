"""Which logs are healthy, and which step of the others to look at."""

import pytest

from loops.autopsy.health import health


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
    ("text", "step"),
    [
        ("." * 20, None),
        ("xxxx" + "." * 20, 4),
        ("xxxxxxxx" + "." * 20, 8),
        ("." * 20 + "x" + "." * 20 + "x" + "." * 10, 42),
        ("mxmx" + "m." * 10, 4),
        ("xx.x." + "." * 20, 4),
        ("." * 30 + "xx", 32),
        ("", None),
    ],
)
def test_a_scale_that_finds_its_level_is_healthy(text, step):
    """Skips at the start, one for each growth, and a spike of a few octaves."""
    found = health(log(text))
    assert (found.healthy, found.step) == (True, step)
    assert found.skips == text.count("x")


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("x" * 20, 1),
        ("...." + "x" * 8, 5),
        ("...xxxxx......", 4),
        ("....." * 4 + "xx..x.x.xx..x.x.xx..", 37),
    ],
)
def test_a_scale_that_falls_is_not(text, step):
    """The first skip of what went wrong last is the step to look at."""
    found = health(log(text))
    assert (found.healthy, found.step) == (False, step)


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


def test_a_scale_below_one_is_no_level():
    """No healthy gradient of float16 has to be made smaller."""
    assert not health(log("...x....", scale=0.25)).healthy
    assert health(log("...x....", scale=1.0)).healthy


def test_rows_without_a_decision_are_passed_over():
    """A program may log a loss alone."""
    assert health([{"step": 1, "loss": 1.0}]) == health([]).__class__(None, True, 0, 0, 1)
