"""The README's step inside `strategy.run`, called from Python and in a `tf.range` loop, one replica of which overflows.

Guards against a promise that only `loops` keeps. What `apply` returns is the same on every replica.
"""

import pytest
import replica_cases as cases
import tensorflow as tf
import written_step


@pytest.fixture(scope="module")
def written():
    step = written_step.Written(cases.mirrored(2))
    step.run([cases.batch(0)], in_graph=False)
    return step


@pytest.mark.slow_with("data-python")
@pytest.mark.exhaustive_with(
    "data-tf.range", "forward-python", "forward-tf.range", "gradients-python", "gradients-tf.range"
)
@pytest.mark.parametrize("in_graph", [False, True], ids=["python", "tf.range"])
@pytest.mark.parametrize("where", ["gradients", "forward", "data"])
def test_every_replica_skips(written, in_graph, where):
    assert written.run([cases.batch(1)] * 3, in_graph) == [True] * 3
    before, attempted = cases.raw(written.moved()), int(written.loss_scaler.counters.attempted)
    spoiled = [cases.spoil(cases.batch(2 + replica), where, replica, 2) for replica in (0, 1, 1)]
    assert written.run(spoiled, in_graph) == [False] * 3
    assert cases.raw(written.moved()) == before
    assert written.run([cases.batch(1), spoiled[1], cases.batch(2)], in_graph) == [True, False, True]
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
