"""Guards how long a study says that it takes: after the first run of a set-up, and from runs that are alike."""

import pytest

from loops.study.compare import Estimate, duration
from loops.study.setups import choose_setups

THREE = choose_setups(["float32", "mixed-none", "mixed-dynamic"])


def test_each_set_up_tells_after_its_first_run():
    estimate = Estimate(THREE, 2)
    assert estimate.ran(0, 4.0) == (
        "study: 1 of 6 runs done, about 4 seconds each in float32; in 16 bits they may take far longer"
    )
    assert estimate.ran(0, 2.0) is None
    # 4 and 2, and four of 50.
    assert estimate.ran(1, 50.0) == "study: 3 of 6 runs done, about 3 minutes for all, 2 minutes left"
    assert estimate.ran(1, 30.0) is None
    # 4 and 2, 50 and 30, and two of 20.
    assert estimate.ran(2, 20.0) == "study: 5 of 6 runs done, about 2 minutes for all, 20 seconds left"
    assert estimate.ran(2, 20.0) is None


def test_one_run_needs_no_estimate():
    assert Estimate(THREE[:1], 1).ran(0, 4.0) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 second"), (89.0, "89 seconds"), (100.0, "2 minutes"), (3600.0, "60 minutes")]
)
def test_a_time_is_rough(seconds, text):
    assert duration(seconds) == text
