"""Guards the forecast against its rule in plain Python over whole histories, in which nothing is carried along."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loops
from loops.observe import Evidence


def mean(values):
    return sum(values) / len(values)


def grows(sizes, losses):
    """Growth at the last of these known steps: log2 of the largest gradients, and the losses."""
    jumps = [0] + [at for at in range(16, len(losses)) if losses[at] > 3 * max(losses[max(at - 32, 0) : at]) > 0]
    lows = [mean(sizes[end - 8 : end]) for end in range(8, len(sizes) + 1)]
    means = [mean(losses[end - 16 : end]) for end in range(16, len(losses) + 1)]
    since = means[jumps[-1] :]
    if len(lows) < 17 or not since or lows[-1] < max(lows[:-16]):
        return False, 0.0, 0
    best = min(since)
    risen, rising = since[-1] - best, len(since) - 1 - max(at for at, one in enumerate(since) if one == best)
    rise = risen / abs(best) if best else math.inf if risen > 0 else 0.0
    return rise >= 0.4 and risen >= 0.05 * abs(means[0]), rise, rising


def runs_out(headroom):
    """In how many steps the headroom is used up, if its line is lower than ever."""
    if len(headroom) < 32 or not all(map(math.isfinite, headroom[-16:])):
        return math.inf
    slope, start = statistics.linear_regression(range(16), headroom[-16:])
    end, lowest = start + 15 * slope, min([one for one in headroom[:-16] if math.isfinite(one)], default=math.inf)
    one, two, three, four = (mean(headroom[-at:][:4]) for at in (16, 12, 8, 4))
    steady = min(one - two, two - three, three - four) >= (one - four) / 6
    return max(end, 0.0) / -slope if slope < 0 and end <= lowest - 0.5 and steady else math.inf


def reference(columns):
    """Step and evidence of the first alarm, with its numbers; None if there is none."""
    sizes, losses, headroom = [], [], []
    for step, loss, low, room in zip(*(columns[name] for name in NAMES), strict=True):
        growth, within = (False, 0.0, 0), math.inf
        if not math.isnan(room):
            headroom.append(room)
            within = runs_out(headroom)
        if low > 0 and math.isfinite(loss):
            sizes.append(-math.log2(low))
            losses.append(loss)
            growth = grows(sizes, losses)
        if growth[0]:
            return step, Evidence.GROWTH, growth[1:], mean(sizes[-8:]) - mean(sizes)
        if within <= 100:
            return step, Evidence.HEADROOM, within
    return None


NAMES = ("step", "loss", "critical_low", "headroom")


def columns(losses, sizes, headroom):
    """Columns of a trace at the scale 2^10, of steps whose largest gradient is 2^size; None for a skip."""
    low = np.array([0.0 if size is None else 2.0**-size for size in sizes])
    return {
        "step": np.arange(1, len(losses) + 1),
        "loss": np.asarray(losses, np.float64),
        "loss_scale": np.full(len(losses), 2.0**10),
        "critical_low": low,
        "critical_high": np.where(low == 0, 1.0, low),
        "headroom": np.asarray(headroom, np.float64),
    }


def check(given_):
    found, expected = loops.observe.forecast(given_), reference(given_)
    if expected is None:
        assert found is None
        return None
    assert (found.step, found.evidence) == expected[:2]
    if found.evidence is Evidence.GROWTH:
        assert (found.rise, found.rising) == (pytest.approx(expected[2][0]), expected[2][1])
        assert found.above == pytest.approx(expected[3], abs=1e-9)
    else:
        assert found.within == pytest.approx(expected[2])
    return found


STEPS = 100
UP = np.maximum(np.arange(STEPS) - 60, 0)


@pytest.mark.parametrize("start", [1.0, 0.0, -3.0])
def test_growth(start):
    found = check(columns(start + 0.05 * UP, -20 + 0.1 * UP, np.full(STEPS, 9.0)))
    assert found.evidence is Evidence.GROWTH
    assert f"{found.above:.1f} octaves above their mean" in str(found)
    assert f"over its lowest of {found.rising} steps ago" in str(found)


@pytest.mark.parametrize(("slope", "warned"), [(0.05, True), (0.5, True), (-0.5, False), (0.0, False)])
def test_headroom_that_is_being_used_up(slope, warned):
    found = check(columns(np.ones(STEPS), np.full(STEPS, -20.0), 9 - slope * UP))
    assert (found is not None) == (warned and 9 - slope * 39 < 100 * slope)
    if found:
        assert found.evidence is Evidence.HEADROOM
        assert f"overflow in about {found.within:.0f} steps" in str(found)


def test_headroom_that_was_lower_before_is_none():
    """After other data began, activations grow again to what they were."""
    assert (
        check(columns(np.ones(STEPS), np.full(STEPS, -20.0), np.where(np.arange(STEPS) < 60, 5, 9 - 0.1 * UP))) is None
    )


def test_headroom_is_compared_with_that_before_the_line():
    """A network that is being made small: in 32 steps at least."""
    falling = columns(np.ones(STEPS), np.full(STEPS, -20.0), 12 - 0.2 * np.arange(STEPS))
    assert check(falling).step == 32
    infinite = falling["headroom"].copy()
    infinite[20] = -math.inf
    assert check({**falling, "headroom": infinite}).step == 37


@pytest.mark.parametrize("octaves", [1, 4, 8])
def test_headroom_that_falls_at_once_is_none(octaves):
    """Other data may be larger."""
    noise = 0.1 * np.sin(np.arange(STEPS))
    headroom = np.where(np.arange(STEPS) < 60, 9, 9 - octaves) + noise
    assert check(columns(np.ones(STEPS), np.full(STEPS, -20.0), headroom)) is None


def jumped(after):
    """Loss and gradients of a healthy run whose data changes at step 61, and what the loss does from step 81 on."""
    late = np.maximum(np.arange(STEPS) - 80, 0)
    losses = np.where(np.arange(STEPS) < 60, 0.1, 0.2 + 3.0 * 0.9**UP) + after * late
    return columns(losses, np.where(np.arange(STEPS) < 60, -20, -18 + 0.1 * late + 2 * 0.8**UP), np.full(STEPS, 9.0))


def test_other_data_is_no_growth():
    assert check(jumped(0.0)) is None
    # Without the count of the lowest loss that begins anew there would be one.
    assert check({**jumped(0.0), "loss": np.maximum(jumped(0.0)["loss"], 2.0)}) is None


def test_growth_behind_other_data_counts_from_its_lowest_loss():
    found = check(jumped(0.3))
    assert found.step > 80
    assert found.rise < 2


@settings(max_examples=60)
@given(st.data())
def test_any_course(data):
    def walk(least, most, steps):
        moves = data.draw(st.lists(st.sampled_from(steps), min_size=STEPS, max_size=STEPS))
        return np.clip(np.cumsum(moves), least, most)

    losses = 2.0 ** walk(-4, 8, [-1.0, -0.25, 0.0, 0.25, 0.5, 2.0])
    sizes = -20 + walk(-4, 12, [-1.0, -0.5, 0.0, 0.5, 1.0])
    headroom = 9 + walk(-12, 4, [-1.0, -0.5, -0.25, 0.0, 0.25, 0.5])
    skipped = data.draw(st.sets(st.integers(0, STEPS - 1), max_size=5))
    headroom[list(skipped)[:2]] = -math.inf
    check(columns(losses, [None if at in skipped else size for at, size in enumerate(sizes)], headroom))
