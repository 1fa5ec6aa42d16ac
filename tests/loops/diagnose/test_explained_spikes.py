"""Guards explanations of special runs: of spikes, of losses that nobody sees, of a damaged log."""

import keras
import numpy as np
import planted
import pytest
import tensorflow as tf
from models import one_layer, squared_error

import loops
import scaler
from halfstep import main
from loops.diagnose.explain.remedies import Kind
from loops.observe import explain
from loops.views.report import write_report

pytestmark = pytest.mark.slow

SPIKE = 11


def program(folder, accumulate=1, resume=False, **guarding):
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(0).normal(size=(12, 8, 4)).astype(np.float32)
    y = np.tanh(x.sum(axis=-1, keepdims=True)).astype(np.float32)
    y[SPIKE - 1] *= 1e3
    guard = scaler.SpikeGuard(scaler.NoScaling(), window=3, **guarding)
    step = loops.TrainStep(
        one_layer(),
        squared_error,
        keras.optimizers.SGD(0.01),
        loss_scaler=scaler.LossScaler(guard),
        accumulate=accumulate,
    )
    actions = [loops.JsonLines(folder / "steps.jsonl"), loops.Checkpoint(folder / "ckpt", every=10, resume=resume)]
    return loops.Loop(step, tf.data.Dataset.from_tensor_slices((x, y)), steps_per_call=1, actions=actions)


def test_a_spike_is_told_with_its_limit(tmp_path, tried):
    tried()
    program(tmp_path).run(SPIKE)
    found = explain(program(tmp_path))
    assert (found.step, found.verdict, found.applied) == (SPIKE, "spike", False)
    name, value, limit = found.spike
    assert (name, value > limit > 0) == ("norm", True)
    assert found.to_dict()["spike"] == ["norm", value, limit]
    write_report([tmp_path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "the norm, the loss or the norm of one gradient was far beyond that of the steps before" in page


def test_a_spike_with_a_guard_of_each_gradient_is_told_in_the_words_of_the_scaler(tmp_path, tried):
    """The log has no limit of each gradient."""
    tried()
    guarding = {"loss": False, "by_tensor": "skip"}
    run = program(tmp_path, **guarding)
    run.run(SPIKE)
    words = run.train_step.loss_scaler.explain().removeprefix("The step was skipped because ")
    found = explain(program(tmp_path, **guarding))
    assert (found.step, found.verdict, found.applied, found.spike) == (SPIKE, "spike", False, None)
    assert found.said == words
    assert found.observed_alike


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


def test_an_applied_step_is_named_with_where_its_loss_began_and_what_to_do(tmp_path, tried):
    tried(Kind.LOSS_IN_FLOAT32)
    found, said = explained(tmp_path, scaler.Static(64.0))
    assert len(said) == 1
    assert said[0].startswith("Step 1 was applied")
    assert (found.verdict, found.applied, found.step, found.where, found.kind) == ("loss", True, 4, "forward", "inf")
    assert "nothing is wrong" not in found.sentence
    assert "the loss in float32" in [remedy.name for remedy in found.remedies if remedy.finite]


def test_before_a_skip_is_said_to_have_no_scale_lower_ones_are_tried(tmp_path, tried):
    tried(Kind.LOSS_IN_FLOAT32)
    found, said = explained(tmp_path, scaler.Dynamic(2.0**8, sees_every_step=True), step=1)
    assert said[0].startswith("Step 3 was applied")
    assert (found.verdict, found.applied, found.loss_scale, found.applied_at) == ("loss", False, 256.0, 64.0)
    assert "no loss scale helps" not in found.sentence
    assert not any(remedy.name.startswith("loss scale") for remedy in found.remedies)


def test_the_loss_that_a_step_scales_counts_where_it_returns_none(tmp_path, tried):
    tried(Kind.ALL_IN_FLOAT32, Kind.ANOTHER_BATCH)
    found, _ = explained(tmp_path, scaler.Static(64.0), step=2, by_hand=True)
    assert (found.verdict, found.applied) == ("loss", True)
    helped = {remedy.name: remedy.finite for remedy in found.remedies}
    assert (helped["every layer in float32"], helped["another batch"]) == (True, False)


def test_damaged_lines_of_the_log_are_named(tmp_path, monkeypatch, capsys, tried):
    tried(Kind.ANOTHER_BATCH)
    monkeypatch.chdir(tmp_path)
    planted.nan_batch(tmp_path).run(planted.STEPS["nan_batch"])
    path = tmp_path / "steps.jsonl"
    first, second, *others = path.read_text().splitlines()
    told = second.replace('"loss"', '"loss": "low", "once"')
    path.write_text("\n".join([first, "{", told, *others, "[1]", '{"step": 6, "lo']))
    capsys.readouterr()
    assert main(["explain", str(tmp_path), "--build", "planted:nan_batch"]) == 0
    told = capsys.readouterr().out
    assert "Step 3 was skipped at loss scale" in told
    assert "steps.jsonl: 3 incomplete or foreign lines were skipped, first line 2." in told
    assert "steps.jsonl: line 3 has the text 'low' as its loss, not a number: it counts as unknown." in told
