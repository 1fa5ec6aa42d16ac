"""A loss that is not finite while its gradients are: said of an applied step, and tried before a skip has no cure."""

import keras
import planted
import pytest
import tensorflow as tf

import loops
import scaler
from loops.diagnose.explain.remedies import Kind
from loops.observe import explain


def in_float16(y, prediction):
    """Infinite from 256 on, with a derivative of 600 / 4 for a target of 300."""
    return tf.cast(tf.reduce_mean(tf.square(tf.cast(y, prediction.dtype) - prediction)), tf.float32)


class ByHand(planted.ByHand):
    """A step that returns neither its loss nor why it was skipped."""

    def __call__(self, x, y):
        outputs = super().__call__(x, y)
        return {"applied": outputs["applied"]}


def loop_of(run, strategy, by_hand=False):
    keras.utils.set_random_seed(1)
    model, loss_scaler = planted.dense(planted.plain(1, "out")), scaler.LossScaler(strategy)
    step = loops.TrainStep(model, in_float16, keras.optimizers.SGD(1e-6), loss_scaler=loss_scaler)
    if by_hand:
        step = ByHand(in_float16, strategy, model, rate=1e-6)
    return planted.loop_of(step, planted.inputs(16, 8), planted.inputs(16, 1) + 300.0, run)


def explained(run, strategy, step=None, by_hand=False, steps=4):
    """The explanation after a run of so many steps, and the warnings of the run."""
    with pytest.warns(scaler.ScaleWarning, match="loss is not finite") as caught:
        loop_of(run, strategy, by_hand).run(steps)
    return explain(loop_of(run, strategy, by_hand), step), [str(one.message) for one in caught]


@pytest.mark.slow
def test_an_applied_step_is_named_with_where_its_loss_began_and_what_to_do(tmp_path, tried):
    tried(Kind.LOSS_IN_FLOAT32)
    found, said = explained(tmp_path, scaler.Static(64.0))
    assert len(said) == 1
    assert said[0].startswith("Step 1 was applied")
    assert (found.verdict, found.applied, found.step, found.where, found.kind) == ("loss", True, 4, "forward", "inf")
    assert "nothing is wrong" not in found.sentence
    assert "the loss in float32" in [remedy.name for remedy in found.remedies if remedy.finite]


@pytest.mark.slow
def test_before_a_skip_is_said_to_have_no_scale_lower_ones_are_tried(tmp_path, tried):
    tried(Kind.LOSS_IN_FLOAT32)
    found, said = explained(tmp_path, scaler.Dynamic(2.0**8, sees_every_step=True), step=1)
    assert said[0].startswith("Step 3 was applied")
    assert (found.verdict, found.applied, found.loss_scale, found.applied_at) == ("loss", False, 256.0, 64.0)
    assert "no loss scale helps" not in found.sentence
    assert not any(remedy.name.startswith("loss scale") for remedy in found.remedies)


@pytest.mark.slow
def test_the_loss_that_a_step_scales_counts_where_it_returns_none(tmp_path, tried):
    tried(Kind.ALL_IN_FLOAT32, Kind.ANOTHER_BATCH)
    found, _ = explained(tmp_path, scaler.Static(64.0), step=2, by_hand=True)
    assert (found.verdict, found.applied) == ("loss", True)
    helped = {remedy.name: remedy.finite for remedy in found.remedies}
    assert (helped["every layer in float32"], helped["another batch"]) == (True, False)
