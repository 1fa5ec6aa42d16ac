"""What counts as a remedy, from the gradients that are left and the loss."""

import numpy as np
import pytest

from loops.diagnose.explain.remedies import Kind, Remedy
from loops.diagnose.explain.trials import absurd_loss, weighed

ANOTHER_BATCH, IN_FLOAT32 = "another batch", "every layer in float32"
KINDS = {ANOTHER_BATCH: Kind.ANOTHER_BATCH, IN_FLOAT32: Kind.ALL_IN_FLOAT32}


def passing(name, loss=1.0):
    return Remedy(KINDS.get(name, Kind.EPSILON), name, True, True, loss, "")


def weigh(remedies, counts, failing=None, losses=(1.0, 2.0, 3.0)):
    counts = {name: np.array(one, np.float32) for name, one in counts.items()}
    found = weighed(remedies, counts, lambda: None if failing is None else np.array(failing, np.float32), losses)
    return {one.name: one for one in found}


def test_the_share_is_of_as_many_values_as_any_remedy_leaves():
    """Another batch has gradients of its own."""
    counts = {"one": [8, 2], "other": [4, 4], ANOTHER_BATCH: [99, 99]}
    found = weigh([passing(name) for name in counts], counts)
    assert (found["one"].gradients_left, found["other"].gradients_left) == (10 / 12, 8 / 12)
    assert found[ANOTHER_BATCH].gradients_left is None
    assert all(one.helps for one in found.values())


@pytest.mark.parametrize(("name", "left"), [("a lower scale", 2 / 12), (IN_FLOAT32, 1.0)])
def test_what_every_remedy_makes_zero_was_due_unless_float32_has_none(name, left):
    """The failing step has a value there, if only a NaN."""
    found = weigh([passing(name)], {name: [2, 0]}, failing=[9, 10])
    assert found[name].gradients_left == pytest.approx(left)


@pytest.mark.parametrize(("counts", "helps"), [([0, 0], False), ([1, 0], False), ([5, 0], True)])
def test_less_than_a_tenth_of_the_gradients_trains_nothing(counts, helps):
    found = weigh([passing("one"), passing("all")], {"one": counts, "all": [10, 10]})
    assert found["one"].helps is helps
    assert found["all"].helps
    assert (found["one"].why_not is None) is helps


@pytest.mark.parametrize(
    ("losses", "loss", "ratio", "helps"),
    [
        ((1.0, 2.0, 3.0), 4.0, 2.0, True),
        ((1.0, 2.0, 3.0), 1e5, 5e4, False),
        ((-1.0, -2.0, -3.0), -4.0, 2.0, True),
        # A loss near 0 has no factor that tells.
        ((1e-9,), 1.0, 1e9, True),
        ((), 1e9, 1e9, False),
    ],
)
def test_a_loss_is_compared_with_those_before_or_else_with_the_least(losses, loss, ratio, helps):
    found = weigh([passing("one", loss), passing("other", 1.0)], {}, losses=losses)
    assert found["one"].loss_ratio == pytest.approx(ratio)
    assert found["one"].helps is helps


def test_what_is_not_known_is_null_and_what_fails_does_not_help():
    found = weigh([passing("one", float("nan")), Remedy(Kind.EPSILON, "failing", True, False, 1.0, "")], {})
    assert (found["one"].loss_ratio, found["one"].gradients_left, found["one"].helps) == (None, None, True)
    assert not found["failing"].helps


def test_a_loss_is_not_usual_since_the_run_diverged():
    """The median of losses that diverge would call any loss a usual one."""
    diverging = [0.6, 4e3, 2e7, 1e11, 7e14, 1e18]
    assert absurd_loss(3.2e6, diverging) == "its loss of 3.2e+06 is 5.3e+06 times the loss of the steps before"
    assert absurd_loss(0.04, diverging) is None
