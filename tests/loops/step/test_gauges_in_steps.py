"""Guards the ready probes of a `TrainStep` against NumPy, and that steps between those of `every` execute none."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from loop_cases import batch, dataset, static
from models import one_layer, plain_model, squared_error

import loops
from scaler import observe

SCALE, RATE = 8.0, 0.125
LAYERS = ["dense", "dense_1"]


def step_of(kinds, every=1, kind="float32", model=None, **arguments):
    model = model or plain_model(kind)
    watch = observe.watch(model, kinds=kinds, every=every)
    return loops.TrainStep(
        model, squared_error, keras.optimizers.SGD(RATE), loss_scaler=static(SCALE), probes=watch, **arguments
    )


def gradient(model, *batches):
    """The gradient of the mean loss of all these batches, as one vector in NumPy."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([squared_error(y, model(x)) for x, y in batches]) / len(batches)
    return np.concatenate([np.ravel(one) for one in tape.gradient(loss, model.trainable_variables)])


@pytest.mark.slow_with("float16")
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_update_rms_is_the_root_of_the_mean_of_squares_over_a_layers_weights(kind):
    step = step_of(["update_rms"], kind=kind)
    call = step if kind == "float16" else tf.function(step)

    def read():
        # In float16 the masters move.
        moved = step.masters.weights if step.masters else step.model.weights
        return [np.asarray(one, np.float64) for one in moved]

    call(batch(0))
    before = read()
    outputs = call(batch(1))
    assert step.probes.gauges == {"update_rms": LAYERS, "update_ratio": LAYERS}
    for place in range(2):
        old = np.concatenate([np.ravel(one) for one in before[2 * place : 2 * place + 2]])
        new = np.concatenate([np.ravel(one) for one in read()[2 * place : 2 * place + 2]])
        rms = np.sqrt(np.mean((new - old) ** 2))
        assert outputs["update_rms"][place].numpy() == pytest.approx(rms, rel=1e-4)
        assert outputs["update_ratio"][place].numpy() == pytest.approx(rms / np.sqrt(np.mean(old**2)), rel=1e-4)
    skipped = call(batch(bad=np.inf))
    assert np.isnan(skipped["update_rms"]).all()


def test_the_noise_scale_is_that_of_mccandlish_from_micro_batches():
    """And a window that overflows has none, and spoils none."""
    step = step_of(["noise_scale"], accumulate=3, model=one_layer())
    small = [batch(seed) for seed in range(3)]
    squares = [np.sum(gradient(step.model, one) ** 2) for one in small]
    large = np.sum(gradient(step.model, *small) ** 2)
    *_, spoiled = [step(one) for one in (batch(0, bad=np.inf), *small[1:])]
    assert not spoiled["applied"]
    outputs = [step(one) for one in small]
    assert all(np.isnan(one["noise_scale"]).all() for one in (spoiled, *outputs[:2]))
    # |G|^2 and S with b = 8 and B = 24, as they are written in appendix A.1.
    signal = (24 * large - 8 * np.mean(squares)) / (24 - 8)
    noise = (np.mean(squares) - large) / (1 / 8 - 1 / 24)
    np.testing.assert_allclose(outputs[2]["noise_scale"], [noise, signal], rtol=1e-4)
    assert step.probes.gauges == {"noise_scale": ["noise", "signal"]}


def test_a_step_in_between_has_nothing_and_one_that_is_due_what_every_step_has():
    """In a loop, which stacks gauges as other vectors."""
    every, second = (step_of(["updates", "activations", "update_rms"], number, model=one_layer()) for number in (1, 2))
    seen = []
    loops.Loop(second, dataset(3), steps_per_call=3, actions=[seen.append]).run(3)
    found = seen[0].vectors
    assert found["update_rms"].shape == (3, 1)
    for seed in range(3):
        whole = every(batch(seed))
        assert bool(found["counts"][seed].any()) == bool(seed % 2)
        if seed % 2:
            for name in ("counts", "amax", "update_rms", "update_ratio"):
                np.testing.assert_allclose(found[name][seed], whole[name], rtol=1e-5, err_msg=name)
        else:
            assert not found["amax"][seed].any()
            assert np.isnan([found["update_rms"][seed], found["update_ratio"][seed]]).all()


def test_what_a_probe_computes_stands_in_branches_alone():
    """Of what counts, reads weights or slots and compares updates nothing runs outside of the branches."""
    kinds = [*observe.KINDS, "update_rms"]

    def outside(step):
        graph = tf.function(step).get_concrete_function(tuple(map(tf.constant, batch()))).graph
        return [operation.type for operation in graph.get_operations()]

    watched, bare = (step_of(kinds, every=10, model=one_layer()) for _ in range(2))
    bare.probes = None
    few, more = outside(bare), outside(watched)
    new = {kind: more.count(kind) - few.count(kind) for kind in {*more} if more.count(kind) > few.count(kind)}
    # The counters of the scaler say whether a step is due: one variable is read, and no weights.
    assert new.pop("ReadVariableOp") == 1
    passes = {"Identity", "IdentityN", "Const", "ConcatV2", "NoOp"}
    assert {*new} - passes == {"If", "StatelessIf", "AddV2", "Sub", "Equal", "FloorMod", "Unpack"}
