"""What cannot work on replicas is refused in a sentence; a strategy of one device is like none.

Guards against hangs and errors from inside TensorFlow in place of a word on what to do.
"""

import functools
import types

import keras
import models
import pytest
import replica_cases as cases
import tensorflow as tf

import loops
import scaler


def looped(strategy, size=8, **arguments):
    return loops.Loop(
        lambda batch: {}, tf.data.Dataset.from_tensors(cases.batch(size=size)), strategy=strategy, **arguments
    )


def apply_outside_of_run():
    with cases.mirrored(2).scope():
        variable, loss_scaler = tf.Variable(1.0), scaler.LossScaler(scaler.Static(1.0))
        try:
            loss_scaler.apply(keras.optimizers.SGD(0.1), [tf.constant(1.0)], [variable])
        finally:
            assert int(loss_scaler.counters.attempted) == 0


def a_loop_without_the_strategy():
    with cases.mirrored(2).scope():
        step = loops.TrainStep(models.one_layer(), models.squared_error, keras.optimizers.SGD(0.1))
    loops.Loop(step, tf.data.Dataset.from_tensors(models.batch()), steps_per_call=1, jit_compile=False).run(1)


def parameter_servers():
    """Without the servers, which one needs to be made."""
    strategy = object.__new__(tf.distribute.ParameterServerStrategy)
    strategy._extended = types.SimpleNamespace(_num_replicas_in_sync=1)
    return strategy


REFUSED = {
    "apply outside of run": apply_outside_of_run,
    "a loop without the strategy": a_loop_without_the_strategy,
    "a jitted loop": lambda: looped(cases.mirrored(2), jit_compile=True),
    "one copy of the weights": lambda: looped(
        tf.distribute.experimental.CentralStorageStrategy(compute_devices=["CPU:0", "CPU:1"])
    ),
    "parameter servers": lambda: looped(parameter_servers()),
    "batches that cannot be split": lambda: looped(cases.mirrored(2), size=7),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work(what, snapshot):
    with pytest.raises(scaler.InvalidArgument) as caught:
        REFUSED[what]()
    assert str(caught.value) == snapshot


@pytest.mark.slow
def test_a_last_batch_that_cannot_be_split():
    """Its size is known when it comes: the steps before it stay, and nothing hangs."""
    x, y = cases.batch(size=7)
    strategy = cases.mirrored(2)
    with strategy.scope():
        model, optimizer = models.one_layer(), keras.optimizers.SGD(0.1)
        step = loops.TrainStep(model, cases.squared_error, optimizer)
    loop = loops.Loop(step, tf.data.Dataset.from_tensor_slices((x, y)).batch(4), strategy=strategy)
    loop.run(1)
    weights = cases.raw(model.variables)
    with pytest.raises(loops.BadBatch, match="drop_remainder=True"):
        loop.run(2)
    assert loop.counters.data == 1
    assert cases.raw(model.variables) == weights


@pytest.mark.slow
def test_a_strategy_of_one_device():
    adam, model = functools.partial(keras.optimizers.Adam, 0.01), functools.partial(models.stateful_model, "float16")
    rig = cases.Rig(cases.mirrored(1), model, adam, kind="float16", steps_per_call=3)
    before = cases.raw(rig.moved())
    spoiled = [cases.spoil(cases.batch(1), where, 0, 1) for where in ("gradients", "forward")]
    assert not rig.run(spoiled)["applied"].any()
    assert cases.raw(rig.moved()) == before
    assert rig.run([cases.batch(1)])["applied"].all()
    assert cases.finite(rig.variables())
