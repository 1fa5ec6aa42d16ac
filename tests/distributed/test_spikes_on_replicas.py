"""A spike is one decision of all replicas, by the norm and the loss of the whole batch, whoever saw it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored
from models import batch, one_layer, squared_error, stateful_model
from replica_cases import agree, raw, shared

import loops
import scaler
from scaler import Cause


class Step:
    """A `TrainStep` with a guard on two replicas, compiled once."""

    def __init__(self, model, **guarding):
        self.strategy = mirrored(2)
        keras.utils.set_random_seed(1)
        with self.strategy.scope():
            self.model, self.optimizer = model(), keras.optimizers.SGD(1e-3, momentum=0.9)
            guard = scaler.SpikeGuard(scaler.Dynamic(2.0**4), window=5, **guarding)
            self.loss_scaler = scaler.LossScaler(guard, select=True)
            self.step = loops.TrainStep(self.model, squared_error, self.optimizer, loss_scaler=self.loss_scaler)
        self.call = tf.function(self._call)

    def _call(self, x, y, factors):
        def own():
            here = tf.distribute.get_replica_context().replica_id_in_sync_group
            return self.step((x, y * factors[here]))

        outputs = self.strategy.run(own)
        return tf.nest.map_structure(lambda value: tf.stack(self.strategy.experimental_local_results(value)), outputs)

    def __call__(self, factors, seed=0):
        x, y = batch(seed)
        return {name: value.numpy() for name, value in self.call(x, y, tf.constant(factors)).items()}

    def moved(self):
        return [*self.model.variables, *self.optimizer.variables]


def test_all_replicas_skip_if_one_share_is_a_spike():
    step = Step(one_layer)
    for seed in range(5):
        seen = step([1.0, 1.0], seed)
    assert seen["applied"].all()
    before = raw(step.moved())
    for replica in range(2):
        factors = [1.0, 1.0]
        factors[replica] = 1e3
        seen = step(factors)
        assert not seen["applied"].any()
        assert set(seen["cause"]) == {int(Cause.SPIKE)}
        assert (seen["grad_norm"] > seen["norm_limit"]).all()
        assert len(set(seen["norm_limit"])) == len(set(seen["loss_limit"])) == 1
        assert raw(step.moved()) == before
        # One spike in a row is allowed here, and the second of them is not.
        if replica == 0:
            step.loss_scaler.check()
        else:
            with pytest.raises(scaler.StuckError, match="2 steps in a row were skipped as spikes, and 1 are allowed"):
                step.loss_scaler.check()
        assert int(step.loss_scaler.last_skip.replica) == -1
    assert float(step.loss_scaler.loss_scale) == 2.0**4
    assert step([1.0, 1.0])["applied"].all()
    assert agree([*step.moved()[: len(step.model.trainable_variables)], *shared(step.loss_scaler)])
    assert np.isfinite(step.loss_scaler.state.norms.numpy()).all()


@pytest.mark.slow
def test_all_replicas_take_the_norms_of_the_whole_batch():
    """The spike of one share makes the same gradients spikes on both, by the norms of their sums."""
    step = Step(stateful_model, loss=False, norm=False, by_tensor="skip")
    for seed in range(5):
        assert step([1.0, 1.0], seed)["applied"].all()
    before = raw(step.moved())
    for replica in range(2):
        factors = [1.0, 1.0]
        factors[replica] = 1e3
        seen = step(factors)
        assert not seen["applied"].any()
        assert set(seen["cause"]) == {int(Cause.SPIKE)}
        assert len(set(seen["variable"])) == 1
        assert raw(step.moved()) == before
    assert step([1.0, 1.0])["applied"].all()
    windows = [value for name, value in step.loss_scaler.state._asdict().items() if name.startswith("tensor")]
    assert all(np.isfinite(value).all() for value in windows)
    assert agree([*step.moved()[: len(step.model.trainable_variables)], *step.loss_scaler._tensor_state.values()])


@pytest.mark.slow
def test_the_long_form_takes_the_largest_norms_of_any_replica():
    strategy = mirrored(2)
    with strategy.scope():
        guard = scaler.SpikeGuard(scaler.Dynamic(2.0**4), window=5, norm=False, loss=False, by_tensor="skip")
        loss_scaler = scaler.LossScaler(guard)

    @tf.function
    def update(norms):
        def own():
            here = tf.distribute.get_replica_context().replica_id_in_sync_group
            loss_scaler.update(scaler.Event(tf.constant(True), norms=norms[here]))

        strategy.run(own)

    update(tf.constant([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]]))
    assert loss_scaler.state.tensor_norms[-1].numpy().tolist() == [3.0, 2.0, 3.0]
