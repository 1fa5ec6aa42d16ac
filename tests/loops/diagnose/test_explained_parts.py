"""Guards that the explanation of a composed step compares its replay with the run part by part."""

import keras
import numpy as np
import planted
import pytest
import tensorflow as tf

import loops
import scaler
from loops.observe import explain

pytestmark = pytest.mark.exhaustive

BAD = 4


def program(run, factor=1.0):
    """Two parts, of which "second" has a loss of its own times a factor; the batch of one step is infinite."""
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=[6, 4, 8]).astype(np.float32)
    x[BAD - 1, 0, 0] = np.inf
    parts = []
    for name, times in (("first", 1.0), ("second", factor)):
        model = planted.dense(planted.plain(8, f"{name}_in"), planted.plain(1, f"{name}_out"))

        def loss(batch, model=model, times=times):
            return times * tf.reduce_mean(tf.cast(model(batch, training=True), tf.float32) ** 2)

        own = scaler.LossScaler(scaler.Dynamic(initial_scale=2.0**8))
        parts.append(loops.Part(name, model, loss, keras.optimizers.SGD(0.01), loss_scaler=own))
    actions = [loops.JsonLines(run / "steps.jsonl"), loops.Checkpoint(run / "checkpoints", every=2, resume=True)]
    return loops.Loop(
        loops.ComposedStep(parts), tf.data.Dataset.from_tensor_slices(x), steps_per_call=2, actions=actions
    )


def test_a_replay_that_is_another_run_is_noticed_part_by_part(tmp_path):
    program(tmp_path).run(6)
    found = explain(program(tmp_path), BAD)
    assert (found.step, found.reproduced) == (BAD, True)
    found = explain(program(tmp_path, factor=1.5), BAD)
    assert not found.reproduced
    assert found.sentence.startswith("The replay differs from the run: Loss of second at step 3 was ")
