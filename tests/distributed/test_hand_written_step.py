"""The README's step inside `strategy.run`, one replica of which overflows.

Guards against a promise that only `loops` keeps. What `apply` returns is the same on every replica.
"""

import keras
import models
import pytest
import replica_cases as cases
import rigs
import tensorflow as tf
from mirrored import one_for_each

import scaler


class Written(rigs.Written):
    """A step as a user writes it, on float16 variables with masters."""

    def __init__(self, strategy):
        self.strategy, self.replicas = strategy, strategy.num_replicas_in_sync
        with strategy.scope():
            model, optimizer = models.stateful_model("float16"), keras.optimizers.Adam(0.01)
            loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10))
            super().__init__(model, optimizer, loss_scaler, 1.0 / self.replicas, clip_norm=1.0)

    def train_step(self, x, y):
        return self.take(x, y)[1]

    @tf.function
    def one(self, x, y):
        return self.strategy.run(self.train_step, args=self.shares(x, y))

    def shares(self, *parts):
        return tuple(one_for_each(self.strategy, tf.split(part, self.replicas)) for part in parts)

    def run(self, batches):
        """Whether each of the batches was applied."""
        outcomes = [self.one(*map(tf.constant, one)) for one in batches]
        for outcome in outcomes:
            for field, value in outcome._asdict().items():
                own = [part.numpy().tobytes() for part in self.strategy.experimental_local_results(value)]
                assert len(set(own)) == 1, field
        return [bool(self.strategy.experimental_local_results(outcome.finite)[0]) for outcome in outcomes]


@pytest.fixture(scope="module")
def written():
    step = Written(cases.mirrored(2))
    step.run([cases.batch(0)])
    return step


@pytest.mark.slow
@pytest.mark.parametrize("where", ["gradients", "forward", "data"])
def test_every_replica_skips(written, where):
    assert written.run([cases.batch(1)] * 3) == [True] * 3
    before, attempted = cases.raw(written.moved()), int(written.loss_scaler.counters.attempted)
    spoiled = [cases.spoil(cases.batch(2 + replica), where, replica, 2) for replica in (0, 1, 1)]
    assert written.run(spoiled) == [False] * 3
    assert cases.raw(written.moved()) == before
    assert written.run([cases.batch(1), spoiled[1], cases.batch(2)]) == [True, False, True]
    assert int(written.loss_scaler.counters.attempted) == attempted + 6
    assert cases.finite([*written.moved(), *written.loss_scaler.variables])
    assert cases.agree([*written.agreed(), *cases.shared(written.loss_scaler)])
    assert cases.raw(written.agreed()) != before[: len(written.agreed())]


@pytest.mark.slow
def test_in_eager_mode(written):
    """`strategy.run` without a `tf.function` around it: slow, but what a debugger sees."""
    before = cases.raw(written.moved())
    args = written.shares(*map(tf.constant, cases.spoil(cases.batch(3), "gradients", 1, 2)))
    outcome = written.strategy.run(written.train_step, args=args)
    assert not any(bool(part) for part in written.strategy.experimental_local_results(outcome.finite))
    assert cases.raw(written.moved()) == before
