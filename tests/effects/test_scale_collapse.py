"""Guards the effect of a collapsing loss scale: what tells first, and its verdicts from made-up runs."""

import numpy as np
import pytest

from benchmarks.effects import collapse_runs, scale_collapse
from benchmarks.effects.collapse_runs import (
    BACK,
    EVERY,
    FLOOR,
    GUARD,
    HYSTERESIS,
    METASEQ,
    NONE,
    Course,
    Restart,
    Runs,
    fall_of,
)
from benchmarks.effects.effect import told

CALM, STEPS = 40, 240


def course(falls=80, rises=90, fails=120, low=-126, accuracy=0.0, stuck=None):
    """A run whose scale falls from 2^16 from one step on, whose loss rises from another, and that fails at a third."""
    steps = np.arange(STEPS)
    scale = 2.0 ** np.clip(16 - np.maximum(steps - falls + 2, 0), low, 16)
    loss = np.where(steps < rises, 0.2, 5.0)
    loss[fails:] = np.nan
    return Course(loss.astype(np.float32), scale.astype(np.float32), steps < fails, {}, stuck, accuracy)


def restart(save, **how):
    """A run from a save."""
    whole = course(**how)
    return Restart(save, Course(*(values[save * EVERY :] for values in whole[:3]), {}, whole.stuck, whole.accuracy))


FINE = {"falls": STEPS, "rises": STEPS, "fails": STEPS, "accuracy": 0.95}


def runs(**changed):
    """Runs in which all is as the page's claims have it."""
    guard = course(falls=STEPS, rises=100, fails=STEPS, accuracy=0.94, stuck=100)
    ramped = {
        NONE: course(stuck=150),
        FLOOR: course(low=0, stuck=150),
        HYSTERESIS: course(fails=130, stuck=160),
        METASEQ: course(low=-5, stuck=150),
        GUARD: guard,
    }
    made = {
        "ramped": {name: [each, each] for name, each in ramped.items()},
        "level": [course(**FINE)] * 2,
        "healthy": [restart(8, **FINE)] * 2,
        "limited": [restart(9, **FINE)] * 2,
        "other": [restart(8)] * 2,
        "again": [[restart(12 - back // EVERY, **FINE | {"accuracy": 0.5 + back / 100}) for back in BACK]] * 2,
    }
    return Runs(CALM, 1.5, **made | changed)


def failing(**changed):
    """The claims that do not hold, and those that cannot be told."""
    claims = told("scale-collapse", 2, STEPS, scale_collapse.found_of(runs(**changed))).claims
    wrong = [number for number, claim in enumerate(claims) if claim.holds is False]
    return wrong, [number for number, claim in enumerate(claims) if claim.holds is None]


def ramped(name, **how):
    """The runs of one way changed."""
    return {"ramped": runs().ramped | {name: [course(**how)] * 2}}


def test_the_verdicts_on_a_collapse_are_those_of_the_numbers():
    assert failing() == ([], [1])
    effect = told("scale-collapse", 2, STEPS, scale_collapse.found_of(runs()))
    assert [number for number, claim in enumerate(effect.claims) if claim.published] == [0, 1, 5, 6]
    assert effect.measured["steps from the fall of the scale to a loss that rises"] == [19, 19]
    assert effect.measured["log2 of the scale at the first loss that is not finite"] == [-26, -26]
    assert effect.beside[0][2].startswith("from 2^16 to 2^-26 as the forward pass overflows, and to 2^-126")


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        (ramped(NONE, rises=70, stuck=150), [3, 4]),
        (ramped(NONE, falls=130, rises=135, stuck=150), [0, 2, 3, 4]),
        ({"healthy": [restart(8, **FINE | {"accuracy": 0.8})] * 2}, [5]),
        (ramped(METASEQ, low=-3, stuck=150), [1]),
        ({"again": [[restart(12, **FINE)] * len(BACK)] * 2}, [7]),
        ({"other": [restart(8, **FINE)] * 2}, [8]),
        (ramped(FLOOR, low=0, accuracy=0.92), [9]),
        (ramped(HYSTERESIS, fails=150), [10]),
        (ramped(GUARD, falls=STEPS, rises=100, fails=190, accuracy=0.95, stuck=100), [11]),
        (ramped(GUARD, falls=STEPS, rises=100, fails=STEPS, accuracy=0.5, stuck=100), [12]),
    ],
)
def test_a_verdict_on_a_collapse_changes_with_its_numbers(changed, wrong):
    assert failing(**changed)[0] == wrong


def test_half_of_what_opt_looked_at_can_agree_and_cannot_disagree():
    assert failing(limited=[restart(9, **FINE | {"accuracy": 0.8})] * 2) == ([], [1, 6])


def test_what_tells_first_is_found_where_it_is():
    fall = fall_of(course(), CALM)
    assert fall == collapse_runs.Fall(scale=80, limit=95, rise=99, guess=90, overflow=120, last=119)
    calm = fall_of(course(**FINE), CALM)
    assert calm == collapse_runs.Fall(*[STEPS] * 5, last=STEPS - 1)


def test_a_loss_that_falls_again_has_not_risen():
    noisy = course(rises=STEPS, fails=STEPS)
    noisy.loss[100:110] = 4.0
    assert fall_of(noisy, CALM).rise == STEPS
    noisy.loss[150:] = 0.41
    assert fall_of(noisy, CALM).rise == 159


def test_steps_before_or_after_are_put_into_words():
    for steps, said in (
        ([4, 8], "6 (4–8) steps sooner"),
        ([-8, -4], "6 (4–8) steps later"),
        ([-2, 8], "from 8 steps sooner to 2 later, 3 sooner on average"),
    ):
        assert scale_collapse.signed(np.array(steps), "sooner", "later") == said
