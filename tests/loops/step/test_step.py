"""Guards `TrainStep`: it is the step a careful person writes by hand, and a skipped one never happened."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from loop_cases import batch, static
from models import normalized, plain_model, squared_error, stateful_model
from rigs import Rig, Written, raw

import loops
import scaler


@functools.cache
def rig(kind):
    """Traced once: whoever takes it sets it back."""
    return Rig(normalized(kind), keras.optimizers.SGD(0.01, momentum=0.9), loss_scaler=static(64.0))


def test_it_equals_the_step_written_by_hand():
    def dynamic():
        return scaler.LossScaler(scaler.Dynamic(256.0, growth_interval=2))

    rig, written = (
        make(stateful_model("float16"), keras.optimizers.SGD(0.01, momentum=0.9), loss_scaler=dynamic(), clip_norm=0.5)
        for make in (Rig, Written)
    )
    by_hand = tf.function(written.take, autograph=False)
    for number in range(5):
        one = batch(number, bad=np.nan if number == 3 else None)
        ours, (loss, theirs) = rig.run([one])[0], by_hand(*one)
        assert bool(ours["applied"]) == bool(theirs.finite) == (number != 3)
        assert ours["attempted"]
        others = {"loss": loss, "loss_scale": theirs.loss_scale, "grad_norm": theirs.grad_norm}
        for name, value in others.items():
            np.testing.assert_array_equal(ours[name], value.numpy())
    assert raw(rig.moved()) == raw(written.moved())
    assert rig.step.masters


def test_the_outputs_are_scalars_of_the_promised_dtypes():
    outputs = rig("float16").call.get_concrete_function(batch()).structured_outputs
    assert {name: (value.dtype.name, value.shape.rank) for name, value in outputs.items()} == {
        **dict.fromkeys(("loss", "loss_scale", "grad_norm", "clipped_norm"), ("float32", 0)),
        **dict.fromkeys(("attempted", "applied"), ("bool", 0)),
        **dict.fromkeys(("cause", "variable"), ("int64", 0)),
    }


def test_clipping_limits_the_update_and_the_norm_reported_is_the_one_before():
    step = loops.TrainStep(
        plain_model(), squared_error, keras.optimizers.SGD(1.0), loss_scaler=static(64.0), clip_norm=0.125
    )
    before = [v.numpy() for v in step.model.trainable_variables]
    assert step(batch())["grad_norm"] > 0.25
    moves = [old - new.numpy() for old, new in zip(before, step.model.trainable_variables, strict=True)]
    np.testing.assert_allclose(np.sqrt(sum(np.sum(one**2) for one in moves)), 0.125, rtol=1e-5)


def test_the_models_own_losses_are_added():
    model = plain_model(kernel_regularizer=keras.regularizers.L2(0.25))
    kernels = [layer.kernel for layer in model.layers]
    before = [kernel.numpy() for kernel in kernels]
    step = loops.TrainStep(model, lambda y, prediction: 0.0 * tf.reduce_sum(prediction), keras.optimizers.SGD(1.0))
    np.testing.assert_allclose(step(batch())["loss"], 0.25 * sum(np.sum(one**2) for one in before), rtol=1e-6)
    for kernel, old in zip(kernels, before, strict=True):
        np.testing.assert_array_equal(kernel.numpy(), old / 2)


@pytest.mark.slow_with("float32-inf")
@pytest.mark.parametrize(("kind", "bad"), [("float32", np.inf), ("float16", np.nan)])
def test_a_skipped_batch_never_happened(kind, bad):
    here, good = rig(kind), [batch(number) for number in range(3)]
    here.reset()
    here.run(good[:1])
    before = raw(here.moved())
    assert here.step.optimizer.iterations.numpy() == 1
    assert not any(outputs["applied"] for outputs in here.run([batch(9, bad=bad)] * 2))
    assert raw(here.moved()) == before
    here.run(good[1:])
    with_bad = raw(here.moved())
    here.reset()
    assert all(outputs["applied"] for outputs in here.run(good))
    assert raw(here.moved()) == with_bad != before


def test_a_power_of_two_changes_no_bit_of_float32_training():
    batches, ends = [batch(number) for number in range(5)], []
    here = Rig(normalized(), keras.optimizers.SGD(0.01, momentum=0.9), loss_scaler=scaler.LossScaler())
    for scale in (1.0, 2.0**40):
        here.reset()
        here.step.loss_scaler._state["loss_scale"].assign(scale)
        ends.append((str(here.run(batches)).replace(str(np.float32(scale)), "the scale"), raw(here.moved())))
    assert ends[0] == ends[1]


def test_printed_it_says_what_it_trains():
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)], name="small")
    step = loops.TrainStep(
        model, squared_error, keras.optimizers.SGD(name="sgd"), loss_scaler=static(8.0), accumulate=2
    )
    named = "LossScaler(Static(loss_scale=8.0)): loss scale 8, 0 steps applied, 0 skipped"
    assert repr(step) == f"TrainStep of model 'small' with sgd, 2 micro-batches to a step; {named}"
