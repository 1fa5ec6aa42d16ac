"""Guards that a run with retry does not depend on how far too high its scale began, nor on where it was stopped.

The reference begins at the highest scale at which the first step does not overflow. A lower one is none in float16: it
flushes some gradients of these tasks to zero, which moves last bits.
"""

import contextlib

import keras
import pytest
from mirrored import mirrored
from rigs import raw

import loops
import loops.tasks
import scaler

FAR_TOO_HIGH = 2.0**40
# On two replicas each has half of the loss.
SOUND = {("digits", 1): 2.0**16, ("digits", 2): 2.0**16, ("text", 1): 2.0**16, ("text", 2): 2.0**17}
STEPS, STOPS = 21, (7, 14, 21)


def trained(name, replicas, initial_scale, folder, stops, policy="mixed_float16"):
    """The bits of the model and its scale after the last stop; at each stop a new process would know as little."""
    for stop in stops:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        strategy = mirrored(replicas) if replicas > 1 else None
        task = loops.tasks.load(name)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model, loss_scaler = task.model(policy), scaler.LossScaler(scaler.Dynamic(initial_scale))
            step = loops.TrainStep(model, task.loss, keras.optimizers.Adam(1e-3), loss_scaler=loss_scaler, retry=True)
        actions = [loops.Checkpoint(folder, every=5, resume=True)]
        counters = loops.Loop(step, task.dataset(32, seed=0), strategy=strategy, actions=actions).run(stop)
        assert (counters.attempted, counters.applied) == (stop, stop)
    return raw(model.variables), float(loss_scaler.loss_scale)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "replicas"), SOUND)
def test_far_too_high_a_scale_and_two_stops_change_no_bit(name, replicas, tmp_path):
    sound, _ = trained(name, replicas, SOUND[name, replicas], tmp_path / "sound", [STEPS])
    whole = trained(name, replicas, FAR_TOO_HIGH, tmp_path / "whole", [STEPS])
    assert whole[0] == sound
    assert whole[1] < FAR_TOO_HIGH
    assert trained(name, replicas, FAR_TOO_HIGH, tmp_path / "stopped", STOPS) == whole


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["digits", "text"])
def test_in_float32_any_scale_will_do(name, tmp_path):
    low, high = (
        trained(name, 1, scale, tmp_path / str(scale), [STEPS], policy="float32")[0]
        for scale in (2.0**10, FAR_TOO_HIGH)
    )
    assert low == high
