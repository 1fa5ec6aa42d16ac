"""Guards that a step is explained whose data nobody can have again, where the run kept its batches."""

import itertools

import keras
import numpy as np
import planted
import pytest
import tensorflow as tf

import loops
import scaler
from loops.observe import explain

pytestmark = pytest.mark.slow

BAD = 4


def program(run, starts, keep):
    """The first time that its data is started, one batch overflows a layer; later ones are harmless, and others."""
    keras.utils.set_random_seed(1)

    def examples():
        start = next(starts)
        random = np.random.default_rng(start)
        for step in itertools.count(1):
            x = random.normal(size=[4, 8]).astype(np.float32)
            yield (np.abs(x) * 2e4 if (start, step) == (0, BAD) else x), random.normal(size=[4, 1])

    ones = keras.initializers.Constant(1.0)
    step = loops.TrainStep(
        planted.dense(planted.plain(8, "first", kernel_initializer=ones), planted.plain(1, "out")),
        planted.squares,
        keras.optimizers.SGD(0.01),
        loss_scaler=scaler.LossScaler(scaler.Dynamic(initial_scale=2.0**8)),
    )
    signature = (tf.TensorSpec([4, 8]), tf.TensorSpec([4, 1]))
    actions = [loops.KeepBatches(run / "batches", last=5)] if keep else []
    actions += [loops.JsonLines(run / "steps.jsonl"), loops.Checkpoint(run / "checkpoints", every=2, resume=True)]
    data = tf.data.Dataset.from_generator(examples, output_signature=signature)
    return loops.Loop(step, data, steps_per_call=2, actions=actions)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*cannot be saved:loops.ResumeWarning")
def test_a_step_is_explained_whose_data_nobody_can_have_again(tmp_path):
    starts = itertools.count()
    program(tmp_path, starts, keep=True).run(5)
    found = explain(program(tmp_path, starts, keep=True))
    assert (found.step, found.reproduced, found.verdict) == (BAD, True, "loss")
    assert (found.where, found.layer, found.kind) == ("forward", "first", "inf")
    assert (found.remedies[0].name, found.remedies[0].finite) == ("another batch", True)
    found = explain(program(tmp_path, starts, keep=False), BAD)
    assert (found.reproduced, found.verdict) == (False, "healthy")
    assert found.sentence.startswith("The replay differs from the run: Step 4 was skipped in the run's log, but is")
    assert "Loss of step 1 was" in found.sentence
    assert "hs.KeepBatches(directory) among the actions keeps the batches from now on." in found.sentence
