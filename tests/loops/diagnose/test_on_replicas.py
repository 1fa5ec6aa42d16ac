"""A step of several replicas is had again, and the replica is named whose share of the batch makes it fail."""

import contextlib
import json

import numpy as np
import planted
import pytest
import tensorflow as tf

from loops.diagnose.explain.measured import at_share_to_blame, in_whole_batch
from loops.diagnose.graph.changes import slower
from loops.observe import explain
from loops.run.rewind import rewind


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An example of replica 1's share overflows a layer in step 3."""
    made = tmp_path_factory.mktemp("replicas")
    planted.on_replicas(made).run(planted.STEPS["on_replicas"])
    return made


@pytest.mark.exhaustive
def test_the_share_is_found(run):
    """The scale is too high for the other share as well, which is not why."""
    found = explain(planted.on_replicas(run))
    assert (found.step, found.reproduced, found.verdict, found.replicas) == (3, True, "loss", (1,))
    assert (found.where, found.layer, found.kind) == ("forward", "first", "inf")
    assert not found.tensor.startswith("replica_1/")
    assert "every layer in float32" in {one.name for one in found.remedies if one.finite}
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["replicas"] == [1]


@pytest.mark.exhaustive
def test_the_replayed_steps_can_be_changed(run):
    """The learning rate is a variable of each replica."""
    moment = rewind(planted.on_replicas(run), 3, at_least=10)
    assert (moment.differs, moment.began_at, moment.replicas) == (None, 0, 2)
    changes = contextlib.ExitStack()

    def change(loop):
        changes.enter_context(slower(loop.train_step.optimizer, 0.1))
        return changes.close

    slow = moment.from_checkpoint(change)
    assert [bool(one["applied"]) for one in slow] == [False, True, False]
    assert float(moment.train_step.optimizer.learning_rate.value.numpy()) == pytest.approx(0.01)


class Told:
    """Attempts that find shares with these numbers at fault."""

    def __init__(self, bad, moment):
        self.bad, self.moment = bad, moment

    def as_run(self, batch):
        return Attempted(int(batch[0]) not in self.bad, "cause")


class Attempted:
    def __init__(self, finite, cause):
        self.finite, self.cause = finite, cause


class Standing:
    replicas = 3

    def __init__(self):
        self.batch, self.next_batch = tf.constant([0, 0, 1, 1, 2, 2]), None


@pytest.mark.parametrize(("bad", "share"), [((1,), 1), ((1, 2), 1), ((0, 1, 2), 0), ((), None)])
def test_the_first_share_that_fails_takes_the_place_of_all(bad, share):
    """Where none does by itself, the batch stays whole."""
    moment, whole = Standing(), Attempted(False, "cause")
    found, attempt = at_share_to_blame(Told(bad, moment), whole)
    assert found == bad
    assert (attempt is whole) == (share is None)
    np.testing.assert_array_equal(moment.batch, [0, 0, 1, 1, 2, 2] if share is None else [share] * 6)
    assert in_whole_batch(1, found, moment) == 1 + 2 * (share or 0)
