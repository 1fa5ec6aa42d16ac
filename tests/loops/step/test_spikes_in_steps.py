"""Guards `SpikeGuard` where people train: windows, probes, logs, `fit`, and a run that bad batches do not cost."""

import keras
import numpy as np
import pytest
from models import batch, normalized, one_layer
from rigs import Rig, raw
from step_cases import part

import loops
import scaler
from scaler import Cause, Dynamic, SpikeGuard


def guarded(**arguments):
    return scaler.LossScaler(SpikeGuard(Dynamic(2.0**4), **{"window": 5, **arguments}))


def rig(loss_scaler, model, **arguments):
    return Rig(model, keras.optimizers.SGD(1e-3, momentum=0.9), loss_scaler=loss_scaler, **arguments)


def spiked(one, factor=1e3):
    x, y = one
    return x, y * np.float32(factor)


@pytest.fixture(scope="module")
def retried():
    """Of windows of two. Whoever takes it sets it back."""
    strategy = SpikeGuard(Dynamic(2.0**10, growth_interval=100), window=5)
    return rig(scaler.LossScaler(strategy), normalized("mixed_float16", dropout=0.0), retry=True, accumulate=2)


def test_a_spiked_window_moves_nothing_and_the_outputs_say_why(retried):
    here = retried
    here.reset()
    seen = here.run([batch(seed) for seed in range(10)])
    assert [one["applied"] for one in seen] == [one["attempted"] for one in seen]
    assert np.isinf(seen[0]["norm_limit"])
    before = raw(here.moved())
    spike = here.run([batch(1), spiked(batch(0))])[-1]
    assert Cause(spike["cause"]) is Cause.SPIKE
    assert spike["grad_norm"] > spike["norm_limit"] > 0
    assert spike["loss_limit"] > 0
    assert spike["variable"] >= 0
    assert raw(here.moved()) == before
    assert here.run([batch(2)] * 2)[-1]["applied"]


@pytest.mark.slow
@pytest.mark.parametrize("by_tensor", ["skip", "clip"])
def test_by_tensor_the_outputs_name_it_or_count_what_was_clipped(by_tensor):
    here = rig(guarded(norm=False, loss=False, by_tensor=by_tensor), one_layer())
    seen = here.run([batch(seed) for seed in range(5)])
    assert all(one["applied"] for one in seen)
    assert [name for name in seen[0] if name in ("norm_limit", "loss_limit")] == []
    before = raw(here.moved())
    (spike,) = here.run([spiked(batch(0))])
    if by_tensor == "skip":
        assert (Cause(spike["cause"]), spike["variable"] >= 0) == (Cause.SPIKE, True)
        assert "clipped_tensors" not in spike
        assert raw(here.moved()) == before
    else:
        assert (spike["applied"], spike["clipped_tensors"] > 0) == (True, True)
        assert spike["clipped_norm"] < spike["grad_norm"]
        assert all(one["clipped_tensors"] == 0 for one in seen)
    assert here.run([batch(2)])[-1]["applied"]


@pytest.mark.slow
def test_each_part_of_a_composed_step_counts_its_own():
    rules = {"one": guarded(norm=False, loss=False, by_tensor="clip"), "other": scaler.LossScaler(Dynamic(2.0**4))}
    parts = [part(name, one_layer(), loss_scaler=rule) for name, rule in rules.items()]
    step = loops.ComposedStep(parts)
    seen = [step(batch(seed)) for seed in range(5)] + [step(spiked(batch(0)))]
    assert [int(outputs["one/clipped_tensors"]) > 0 for outputs in seen] == [False] * 5 + [True]
    assert "other/clipped_tensors" not in seen[0]
    assert all(bool(outputs["applied"]) for outputs in seen)


def test_the_scale_is_as_before_the_retries_of_a_spiked_window(retried):
    """Its first micro-batch overflows, and is retried before anybody knows the norm of the window."""
    here = retried
    here.reset()
    loss_scaler = here.step.loss_scaler
    here.run([batch(seed) for seed in range(10)])
    before = Dynamic().init()._fields, loss_scaler.state
    seen = here.run([spiked(batch(0), 1e4), batch(1)])
    assert (Cause(seen[-1]["cause"]), seen[0]["retries"] > 0) == (Cause.SPIKE, True)
    for field in before[0]:
        assert float(getattr(loss_scaler.state, field)) == float(getattr(before[1], field))
    assert here.run([batch(2)] * 2)[-1]["applied"]


@pytest.mark.slow
def test_fit_rolls_a_spike_back():
    model = normalized(dropout=0.0)
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.Adam(1e-3), SpikeGuard(Dynamic(2.0**4), window=5))
    model.compile(optimizer, loss="mse", jit_compile=False)
    scaler.protect(model)
    for seed in range(5):
        model.train_on_batch(*batch(seed))
    before = raw(model.variables, optimizer.inner_optimizer.variables)
    model.train_on_batch(*spiked(batch(0)))
    assert Cause(int(optimizer.loss_scaler.last_skip.cause)) is Cause.SPIKE
    assert raw(model.variables, optimizer.inner_optimizer.variables) == before
    model.train_on_batch(*batch(6))
    assert [int(one) for one in optimizer.loss_scaler.counters] == [7, 6, 1, 0]
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert again.loss_scaler.strategy == optimizer.loss_scaler.strategy
