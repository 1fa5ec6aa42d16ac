"""Guards `loops.Explain`: what it finds at a visit, whom it tells, and that a run keeps its bits."""

import io
import json

import keras
import numpy as np
import pytest
import rich.console
import tensorflow as tf
from loop_cases import line
from mirrored import mirrored
from models import batch, squared_error
from rigs import raw

import loops
import scaler
from loops.diagnose.explain import action as explain_action
from loops.diagnose.explain.explanation import Explanation
from loops.diagnose.explain.remedies import Kind
from loops.observe import explain_batch
from scaler import Cause

SIZE = 8


def batches(*bad, count=6):
    """So many batches, of which those with these numbers, counted from 1, hold a NaN in their third example."""
    x, y = batch(3, size=SIZE * count)
    for number in bad:
        x[SIZE * (number - 1) + 2, 1] = np.nan
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(SIZE, drop_remainder=True)


class Moving(keras.layers.Layer):
    """Keeps a moving mean and draws numbers, as BatchNorm and dropout do, in few operations."""

    def build(self, shape):
        self.mean = self.add_weight(shape=[], initializer="zeros", trainable=False, autocast=False)
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x):
        self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(tf.cast(x, tf.float32)))
        return x * keras.random.uniform(tf.shape(x), 0.5, 1.5, dtype=x.dtype, seed=self.seed)


class Run:
    """A step with a moving mean, drawn numbers and float16 in a loop, and all that it came to."""

    def __init__(self, data, *actions):
        # Few variables: each repetition of the step is traced anew.
        layers = [keras.layers.Dense(1, use_bias=False, dtype="mixed_float16"), Moving(dtype="mixed_float16")]
        self.model, self.rows = keras.Sequential([keras.Input([4]), *layers]), []
        # Its scale falls at bad data, too: that of the step is not the one after it.
        loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10, sees_every_step=True))
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(self.model.trainable_variables)
        self.step = loops.TrainStep(self.model, squared_error, optimizer, loss_scaler=loss_scaler)
        self.variables = [*loss_scaler.variables, *optimizer.variables, *self.model.variables]
        self.start = [variable.numpy() for variable in self.variables]
        # XLA could not compile it, as it draws numbers: the loop need not trace it to find out.
        self.loop = loops.Loop(
            self.step, data, steps_per_call=2, actions=[*actions, self.rows.append], jit_compile=False
        )

    def take(self, steps):
        """From the start on; the bytes of what it came to."""
        for variable, value in zip(self.variables, self.start, strict=True):
            variable.assign(value)
        self.rows.clear()
        self.loop.run(self.loop.counters.data + steps)
        return raw(self.variables), [{name: values.tobytes() for name, values in r.outputs.items()} for r in self.rows]


class Own:
    """A step of one's own in float32, with one weight, that does not return its scale."""

    def __init__(self, stuck=None):
        self.weight, self.optimizer = tf.Variable(tf.ones([4, 1])), keras.optimizers.SGD(0.001)
        self.loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10), stuck=stuck)
        self.take = tf.function(self._take)

    def _take(self, x, y):
        with tf.GradientTape() as tape:
            loss = squared_error(y, x @ self.weight)
            scaled = self.loss_scaler.scale(loss)
        outcome = self.loss_scaler.apply(self.optimizer, tape.gradient(scaled, [self.weight]), [self.weight])
        return {"loss": loss, "applied": outcome.finite}

    def moved(self):
        return raw([self.weight], self.optimizer.variables, self.loss_scaler.variables)


def quiet():
    """A bar whose terminal is a text."""
    text = io.StringIO()
    return text, loops.Progress(console=rich.console.Console(file=text, width=200))


@pytest.mark.dear("an explanation traces the step again for each thing that it tries")
def test_a_batch_with_a_nan_is_explained_and_the_run_keeps_its_bits(tmp_path):
    run, (shown, progress), found = Run(batches(4).repeat()), quiet(), loops.Explain(seconds=0)
    without = run.take(6)
    run.loop.actions += [progress, found, loops.JsonLines(tmp_path / "steps.jsonl")]
    assert run.take(6) == without
    assert run.loop.counters.applied == 10
    (one,) = found.explanations
    told = (one.step, one.verdict, one.where, one.kind, one.example, one.blame)
    assert told == (10, "loss", "data", "nan", 2, "batch")
    assert (one.reproduced, one.loss_scale, one.other_batch) == (True, 2.0**10, "previous")
    assert not any(remedy.tried for remedy in one.remedies)
    assert one.sentence in shown.getvalue()
    (written,) = json.loads((tmp_path / "explanations.json").read_text())["explanations"]
    assert (written["step"], written["sentence"]) == (10, one.sentence)
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 6


@pytest.mark.slow
def test_what_a_window_calls_an_overflow_is_explained_once_its_scale_is_1():
    """A window takes no second look at its backward pass, which no scale helps here."""
    root = keras.layers.Lambda(lambda x: tf.sqrt(tf.nn.relu(x)), name="root")
    zeros = keras.layers.Dense(3, kernel_initializer="zeros", use_bias=False)
    model = keras.Sequential([keras.Input((5,)), zeros, root])
    loss_scaler, found = scaler.LossScaler(scaler.Dynamic(2.0, backoff_factor=0.5)), loops.Explain(seconds=0)
    step = loops.TrainStep(model, squared_error, keras.optimizers.SGD(0.1), loss_scaler=loss_scaler, accumulate=2)
    data = tf.data.Dataset.from_tensors((tf.ones([6, 5]), tf.ones([6, 3]))).repeat()
    run = loops.Loop(step, data, steps_per_call=2, actions=[found])
    run.run(2)
    assert found.explanations == []
    run.run(4)
    (one,) = found.explanations
    assert (one.step, one.loss_scale, one.verdict, one.layer) == (4, 1.0, "backward", "root")


def test_a_run_that_went_back_is_explained_anew(tmp_path, monkeypatch):
    """What was explained of steps that were left out stands in nobody's way, also where it is the same."""
    monkeypatch.setattr(
        explain_action, "explain_recent", lambda loop, recent, seconds: Explanation(recent.step, True, None, "loss")
    )

    def step(cause):
        return {"cause": cause, "variable": -1, "applied": tf.equal(cause, int(Cause.NONE))}

    causes = np.full(40, Cause.NONE)
    causes[[12, 30]], causes[14:16] = Cause.LOSS, Cause.SPIKE
    data, found = tf.data.Dataset.from_tensor_slices(causes), loops.Explain(seconds=0)
    saves = loops.Checkpoint(tmp_path / "saved", every=5, resume=True)
    log = loops.JsonLines(tmp_path / "steps.jsonl")
    actions = [saves, loops.Rewind(to=4, skip=8, spikes=2), found, log]
    loops.Loop(step, data, steps_per_call=1, actions=actions).run(24)
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    (skipped,) = [row["step"] for row in rows if not row["applied"]]
    (written,) = json.loads((tmp_path / "explanations.json").read_text())["explanations"]
    assert (written["step"], [one.step for one in found.explanations]) == (skipped, [skipped])


def test_a_stuck_run_says_why_in_its_error():
    """A scale that the step does not return is neither guessed nor said, and the updates since are counted."""
    found, step = loops.Explain(seconds=0), Own(stuck=scaler.StuckPolicy(skip_rate=0.3, over=3))
    loop = loops.Loop(step.take, batches(1), steps_per_call=3, actions=[found])
    with pytest.raises(scaler.StuckError, match="1 of the last 3 steps") as error:
        loop.run(3)
    # It was explained at this visit, and not once more.
    (one,) = found.explanations
    assert (one.step, one.loss_scale, one.where, one.kind) == (1, None, "data", "nan")
    assert "loss scale" not in one.sentence.partition(":")[0]
    assert (one.reproduced, one.other_batch) == (False, "next")
    assert "weights that have moved since, by 2 updates." in one.sentence
    assert str(error.value).endswith(one.sentence)
    assert step.loss_scaler.explain(loop) == one.sentence
    assert step.loss_scaler.explain(skipping()) == step.loss_scaler.explain()


def skipping(*actions):
    """A loop whose second and fourth step are skipped, for a loss that is not finite."""

    def step(number):
        applied = number % 2 > 0
        return {"loss": tf.where(applied, 1.0, np.nan), "applied": applied}

    return loops.Loop(step, tf.data.Dataset.range(1, 9).repeat(), steps_per_call=2, actions=actions)


def test_an_explanation_that_fails_does_not_end_the_run(monkeypatch, capsys):
    def fails(*arguments):
        raise ZeroDivisionError("no room")

    monkeypatch.setattr(explain_action, "explain_recent", fails)
    assert skipping(loops.Explain()).run(4).skipped == 2
    # Without a bar it is said on standard error, once for each kind.
    assert capsys.readouterr().err == "Step 2 was skipped, and could not be explained: no room\n"


def test_a_file_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(explain_action, "explain_recent", lambda *arguments: Explanation(2, True, None, "loss"))

    def in_the_way(visit):
        (tmp_path / "explanations.json").mkdir(exist_ok=True)

    loop = skipping(in_the_way, loops.JsonLines(tmp_path / "steps.jsonl"), loops.Explain())
    assert loop.run(4).skipped == 2
    assert "explanations.json'): it cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [{"most": 0}, {"most": 1.5}, {"seconds": -1}, {"seconds": "60"}, {"seconds": float("nan")}]
)
def test_arguments_that_cannot_work_are_refused(wrong):
    with pytest.raises(scaler.InvalidArgument, match=f"Explain.{next(iter(wrong))}="):
        loops.Explain(**wrong)


@pytest.mark.slow
def test_a_step_of_ones_own_is_explained_right_behind_it():
    own = Own()
    first, second = batches(2, count=2)
    own.take(*first)
    with pytest.raises(scaler.InvalidArgument, match="explain_batch"):
        explain_batch(own.take, first)
    own.take(*second)
    before = own.moved()
    found = explain_batch(own.take, list(second), seconds=0)
    assert own.moved() == before
    assert (found.step, found.verdict, found.where, found.loss_scale, found.example) == (2, "loss", "data", 2.0**10, 2)


@pytest.mark.slow
def test_what_an_optimizer_did_is_told_in_the_words_of_the_parts_scaler(tried):
    tried(Kind.LEARNING_RATE)

    def part(name, rate):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
        rule = scaler.LossScaler(scaler.Dynamic(8.0), stuck=scaler.StuckPolicy(consecutive_skips=1))

        def loss(pair):
            return squared_error(pair[1], model(pair[0]))

        return loops.Part(name, model, loss, keras.optimizers.SGD(rate), loss_scaler=rule)

    step = loops.ComposedStep([part("a", 0.1), part("b", float("nan"))])
    found = loops.Explain(seconds=0)
    data = tf.data.Dataset.from_tensors((tf.ones([6, 3]), tf.ones([6, 1]))).repeat()
    with pytest.raises(scaler.StuckError, match=r"^Part 'b': The loss scaler with .* is stuck.*rate of SGD"):
        loops.Loop(step, data, steps_per_call=1, actions=[found]).run(5)
    (one,) = found.explanations
    assert one.verdict == "update"
    assert one.said.startswith("in part 'b', the learning rate of SGD is NaN")
    assert f"Step 1 was skipped at loss scale 8: {one.said}" in one.sentence


@pytest.mark.slow
def test_every_replica_repeats_the_step_at_its_scale(tmp_path, tried):
    tried()
    strategy = mirrored(2)
    with strategy.scope():
        loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10))
        optimizer = keras.optimizers.SGD(0.01)
        step = loops.TrainStep(line("mixed_float16"), squared_error, optimizer, loss_scaler=loss_scaler)
    here = loops.Explain(seconds=0)
    actions = [loops.JsonLines(tmp_path / "steps.jsonl"), quiet()[1], here]
    loop = loops.Loop(step, batches(1), strategy=strategy, steps_per_call=1, actions=actions, jit_compile=False)
    loop.run(1)
    (one,) = here.explanations
    assert (one.step, one.loss_scale, one.differs, one.reproduced) == (1, 2.0**10, None, True)
