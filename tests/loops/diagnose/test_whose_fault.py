"""Whose fault a bad batch is: of itself, of the dataset, or not of it alone. Nothing is said of what was not tried."""

import math
import types

import numpy as np
import planted
import pytest
import tensorflow as tf

from loops.diagnose.explain.examples import lost_columns
from loops.diagnose.explain.explain import step_with_finite_batches
from loops.diagnose.explain.explanation import Explanation, describe
from loops.diagnose.explain.remedies import Kind, Remedy
from loops.diagnose.explain.trials import blame_of
from loops.observe import explain

GOOD = (tf.ones([3, 2]), tf.ones([3]))
BAD = (tf.constant([[1.0, 1.0], [1.0, math.nan], [1.0, 1.0]]), tf.ones([3]))
PASSES = "The next batch passes with the same weights"


def another(finite, tried=True):
    return Remedy(Kind.ANOTHER_BATCH, "another batch", tried, finite, 1.0, "", helps=finite)


def of_data(remedies, blame, **fields):
    return describe(
        Explanation(1, True, None, "loss", where="data", kind="nan", remedies=tuple(remedies), blame=blame, **fields)
    )


@pytest.mark.parametrize(
    ("batch", "following", "remedies", "blame"),
    [
        (BAD, GOOD, [another(True)], "batch"),
        (BAD, GOOD, [another(False)], "batch"),
        (BAD, GOOD, [another(False, tried=False)], "batch"),
        (BAD, None, [], "batch"),
        (BAD, BAD, [another(False)], "dataset"),
        # Finite values that 16 bits make infinite.
        (GOOD, GOOD, [another(True)], "batch"),
        (GOOD, GOOD, [another(False)], None),
        (GOOD, None, [], None),
    ],
)
def test_what_is_said_of_the_next_batch_is_what_its_trial_showed(batch, following, remedies, blame):
    moment = types.SimpleNamespace(batch=batch, next_batch=following)
    assert blame_of(remedies, "data", None, moment) == blame
    said = of_data(remedies, blame)
    assert (PASSES in said) == any(one.finite for one in remedies)


def test_columns_that_no_example_fills():
    x = np.ones([4, 3], np.float32)
    x[:, 1] = np.nan
    images = np.ones([4, 2, 2, 3], np.float32)
    images[..., 2] = np.inf
    whole = np.full([4], np.nan, np.float32)
    batch = tuple(map(tf.constant, (x, images, whole, np.arange(4))))
    assert lost_columns(batch) == ((0, 1), (1, 2), (2, None))
    assert lost_columns(batch, (tf.ones([2, 3]), *batch[1:])) == ((1, 2), (2, None))
    assert lost_columns((tf.zeros([0, 3]), tf.zeros([4, 0]), tf.constant(1.0), tf.sparse.eye(3))) == ()


@pytest.mark.parametrize(
    ("batches", "later", "step"),
    [
        ({4: GOOD, 5: GOOD}, (4, 5), 4),
        ({4: BAD, 5: BAD, 6: GOOD}, (4, 5, 6), 6),
        ({4: BAD, 5: BAD}, (4, 5), None),
        # The only skips that a high scale does not explain.
        ({4: GOOD, 5: GOOD, 6: GOOD}, (6,), 6),
        # Windows of two: all batches of one have to be finite.
        ({4: BAD, 5: GOOD, 6: GOOD, 7: GOOD}, (5, 7), 7),
    ],
)
def test_the_first_later_step_whose_batches_are_finite(batches, later, step):
    attempts = [3, *(later if 7 in batches else batches)]
    moment = types.SimpleNamespace(
        step=3,
        rows=[{"step": number, "attempted": number in attempts} for number in (3, *batches)],
        later_batches=lambda last: (batches[number] for number in range(4, last + 1)),
    )
    assert step_with_finite_batches(moment, later) == step


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """The explanation of a planted run."""

    def of(name, **options):
        run = tmp_path_factory.mktemp(name)
        build = getattr(planted, name)
        build(run).run(planted.STEPS[name])
        return explain(build(run), **options)

    return of


@pytest.mark.exhaustive
def test_a_second_fault_in_the_same_streak_is_explained(explained):
    """The bad batch cost one step, what follows the run."""
    found = explained("nan_batch_then_overflow")
    assert (found.step, found.layer, found.where, found.reproduced) == (4, "exponential", "forward", True)
    assert (
        "Step 3, where the streak of these 9 further skips began, was skipped for another reason: the batch held a"
        in (found.sentence)
    )
