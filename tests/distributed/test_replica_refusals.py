"""What cannot work on replicas is refused in a sentence; a strategy of one device is like none.

Guards against hangs and errors from inside TensorFlow in place of a word on what to do.
"""

import types

import keras
import models
import pytest
import replica_cases as cases
import tensorflow as tf

import loops
import scaler


def test_apply_and_update_outside_of_run():
    strategy = cases.mirrored(2)
    with strategy.scope():
        variable = tf.Variable(1.0)
        loss_scaler = scaler.LossScaler(scaler.Static(1.0))
        with pytest.raises(scaler.InvalidArgument, match=r"works inside strategy\.run"):
            loss_scaler.apply(keras.optimizers.SGD(0.1), [tf.constant(1.0)], [variable])
    assert int(loss_scaler.counters.attempted) == 0


def test_whole_step_jit_on_several_replicas():
    strategy = cases.mirrored(2)
    dataset = tf.data.Dataset.from_tensors(cases.batch())
    with pytest.raises(scaler.InvalidArgument, match=r"Loop\(jit_compile=True\) on 2 replicas.*TrainStep"):
        loops.Loop(lambda batch: {}, dataset, strategy=strategy, jit_compile=True)


@pytest.mark.parametrize("kind", ["CentralStorageStrategy", "ParameterServerStrategy"])
def test_one_copy_of_the_weights_for_all_devices(kind):
    if kind == "CentralStorageStrategy":
        strategy = tf.distribute.experimental.CentralStorageStrategy(compute_devices=["CPU:0", "CPU:1"])
    else:  # Without the servers, which one needs to be made.
        strategy = object.__new__(tf.distribute.ParameterServerStrategy)
        strategy._extended = types.SimpleNamespace(_num_replicas_in_sync=1)
    with pytest.raises(scaler.InvalidArgument, match=rf"Loop\(strategy={kind}.*one copy of the weights.*Mirrored"):
        loops.Loop(lambda batch: {}, tf.data.Dataset.from_tensors(cases.batch()), strategy=strategy)


def test_batches_that_cannot_be_split():
    dataset = tf.data.Dataset.from_tensors(cases.batch(size=7))
    with pytest.raises(scaler.InvalidArgument, match="batches of 7 for 2 replicas: expected a multiple of 2"):
        loops.Loop(lambda batch: {}, dataset, strategy=cases.mirrored(2))


@pytest.mark.slow
def test_a_last_batch_that_cannot_be_split():
    """Its size is known when it comes: the steps before it stay, and nothing hangs."""
    x, y = cases.batch(size=7)
    strategy = cases.mirrored(2)
    with strategy.scope():
        model, optimizer = models.plain_model(), keras.optimizers.SGD(0.1)
        step = loops.TrainStep(model, cases.squared_error, optimizer)
    loop = loops.Loop(step, tf.data.Dataset.from_tensor_slices((x, y)).batch(4), strategy=strategy)
    loop.run(1)
    weights = cases.raw(model.variables)
    with pytest.raises(loops.BadBatch, match="batch with drop_remainder=True"):
        loop.run(2)
    assert loop.counters.data == 1
    assert cases.raw(model.variables) == weights


@pytest.mark.slow
@pytest.mark.exhaustive_with("OneDeviceStrategy")
@pytest.mark.parametrize("name", ["OneDeviceStrategy", "MirroredStrategy of one"])
def test_a_strategy_of_one_device(name):
    strategy = tf.distribute.OneDeviceStrategy("CPU:1") if name == "OneDeviceStrategy" else cases.mirrored(1)
    adam = lambda: keras.optimizers.Adam(0.01)  # noqa: E731
    rig = cases.Rig(strategy, lambda: models.stateful_model("float16"), adam, kind="float16", steps_per_call=3)
    before = cases.raw(rig.moved())
    spoiled = [cases.spoil(cases.batch(1), where, 0, 1) for where in ("gradients", "forward")]
    assert not rig.run(spoiled)["applied"].any()
    assert cases.raw(rig.moved()) == before
    assert rig.run([cases.batch(1)])["applied"].all()
    assert cases.finite(rig.variables())
