"""Guards that a learning rate wrong by any factor is found, also that of a part, and that only what was tried helps."""

import contextlib
import json
import types

import keras
import numpy as np
import planted
import pytest
import tensorflow as tf
from models import squared_error

import loops
import scaler
from loops.diagnose.explain import case
from loops.diagnose.explain.attempts import Attempts, held, size_of_update
from loops.diagnose.explain.case import Case, lower_rates, rate_of
from loops.diagnose.explain.measured import largest, lost_weight
from loops.diagnose.explain.remedies import OF_THE_UPDATE, Kind
from loops.diagnose.explain.trials import try_since_checkpoint
from loops.diagnose.graph.models import failed_part, optimizers_of, weights_in_step
from loops.observe import explain
from loops.run.rewind import rewind


@pytest.mark.parametrize(
    ("rate", "parts"),
    [
        (0.01, [0.1, 0.01, 0.001]),
        (60.0, [0.1, 0.01, 0.001, 1e-6]),
        (1e6, [0.1, 0.01, 0.001, 1e-6, 1e-9]),
        (float("nan"), [0.1, 0.01, 0.001]),
        (float("inf"), [0.1, 0.01, 0.001]),
    ],
)
def test_the_rates_end_where_one_is_usual(rate, parts):
    found = list(lower_rates({"": keras.optimizers.SGD(rate)}))
    assert [one["factor"] for one in found] == pytest.approx(parts)


def test_what_a_rate_would_be_is_said_where_it_is_known():
    advice = "Lower the learning rate of part 'b' to 0.1 of its value"
    (row,) = (one for one in OF_THE_UPDATE if one.kind is Kind.LEARNING_RATE)
    (first, *_) = lower_rates({" of part 'b'": keras.optimizers.SGD(60.0)})
    said = row.name.format(**first), row.advice.format(**first)
    assert said == ("0.1 of the learning rate of part 'b'", f"{advice}, which is 6.")
    schedule = keras.optimizers.schedules.ExponentialDecay(60.0, 1, 0.5)
    (first, *_) = lower_rates({" of part 'b'": keras.optimizers.SGD(schedule)})
    assert row.advice.format(**first) == f"{advice}."


def test_the_size_of_an_update_is_a_share_of_the_weights():
    one, other = tf.Variable([3.0, 0.0]), keras.Variable(np.array([4.0]))
    before = held([one, other])
    assert (largest(before), size_of_update(before)) == (4.0, 0.0)
    one.assign([3.0, 10.0])
    assert size_of_update(before) == pytest.approx(2.0)
    one.assign([3.0, np.inf])
    assert size_of_update(before) == np.inf
    assert size_of_update(held([tf.Variable([0.0])])) is None
    assert size_of_update(held([])) is None


def composed(rates, every=1):
    """A step of one part for each rate, with a layer in float16."""
    parts = []
    for name, rate in rates.items():
        model = planted.dense(planted.plain(1, f"{name}_out"))

        def loss(pair, model=model):
            return squared_error(pair[1], model(pair[0], training=True))

        own = scaler.LossScaler(scaler.Dynamic(2.0**10), name=name)
        turns = every if name == "b" else 1
        parts.append(loops.Part(name, model, loss, keras.optimizers.SGD(rate), loss_scaler=own, every=turns))
    return loops.ComposedStep(parts)


PAIR = planted.inputs(4, 8), planted.inputs(4, 1)


def loop_of_parts(run, rates, every):
    keras.utils.set_random_seed(1)
    data = tf.data.Dataset.from_tensors(PAIR).repeat()
    actions = [loops.JsonLines(run / "steps.jsonl"), loops.Checkpoint(run / "checkpoints", every=100)]
    return loops.Loop(composed(rates, every), data, steps_per_call=1, actions=actions, jit_compile=False)


def test_which_part_failed():
    step = composed({"a": 0.1, "b": 0.1})
    applied = {"a/applied": True, "b/applied": False, "variable": -1}
    assert failed_part(step, applied) == "b"
    # With one scaler for all parts, each is skipped with that of the variable.
    every = {"a/applied": False, "b/applied": False}
    assert [failed_part(step, {**every, "variable": at}) for at in (-1, 1, 2)] == ["a", "a", "b"]
    assert failed_part(step, {"a/applied": True, "b/applied": False, "b/attempted": False}) is None
    assert failed_part(lambda batch: {}, every) is None
    own = [id(one) for one in weights_in_step(step, "b")]
    assert own == [id(one) for one in step.parts[1].variables]
    assert len(weights_in_step(step)) == 4


def tenfold(run, *, bad=None, accumulate=1, every=100):
    """A rate that each update multiplies by ten; one value of the batch of step `bad` is NaN."""
    keras.utils.set_random_seed(1)
    x = np.ones((12, 4, 4), np.float32)
    if bad:
        x[bad - 1, 2, 1] = np.nan
    rate = keras.optimizers.schedules.ExponentialDecay(1e-9, 1, 10.0)
    step = loops.TrainStep(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="only")]),
        squared_error,
        keras.optimizers.SGD(rate),
        loss_scaler=scaler.LossScaler(scaler.Static(64.0)),
        accumulate=accumulate,
    )
    saves = loops.Checkpoint(run / "checkpoints", every=every, resume=True)
    data = tf.data.Dataset.from_tensor_slices((x, x[..., :1]))
    return loops.Loop(step, data, steps_per_call=1, actions=[loops.JsonLines(run / "steps.jsonl"), saves])


@pytest.mark.slow_with("1-4-rates1")
@pytest.mark.parametrize(("accumulate", "bad", "rates"), [(2, None, (1e-8, 1e-6)), (1, 4, (1e-6, 1e-3))])
def test_the_rate_before_is_that_of_the_checkpoint(tmp_path, accumulate, bad, rates):
    """Micro-batches and skipped steps are no updates."""
    tenfold(tmp_path, bad=bad, accumulate=accumulate, every=3).run(8)
    moment = rewind(tenfold(tmp_path, bad=bad, accumulate=accumulate, every=3), 8, at_least=2)
    assert moment.began_at == 3
    assert Case(Attempts(moment)).risen_rate == pytest.approx(rates)
    assert rate_of(moment.train_step.optimizer) == pytest.approx(rates[1])


@pytest.mark.slow
def test_a_rate_that_the_step_itself_raised_is_told(tmp_path, tried):
    """It is no schedule, so that none can be put in its place."""
    data = tf.data.Dataset.from_tensors((tf.ones([4, 1]), tf.ones([4, 1]))).repeat()

    def made():
        weight, optimizer = tf.Variable([[1.0]]), keras.optimizers.SGD(1e-9)
        loss_scaler = scaler.LossScaler(scaler.Static(64.0))

        def step(x, y):
            optimizer.learning_rate.assign(optimizer.learning_rate * 10.0)
            with tf.GradientTape() as tape:
                loss = squared_error(y, x @ weight)
                scaled = loss_scaler.scale(loss)
            outcome = loss_scaler.apply(optimizer, tape.gradient(scaled, [weight]), [weight])
            return {"loss": loss, "applied": outcome.finite}

        actions = [loops.Checkpoint(tmp_path, every=100)]
        return loops.Loop(step, data, steps_per_call=1, actions=actions)

    made().run(4)
    moment = rewind(made(), 4)
    assert Case(Attempts(moment)).risen_rate == pytest.approx((1e-9, 1e-6))
    tried(Kind.LEARNING_RATE, rates=(0.1,))
    assert not any("kept" in one.name for one in try_since_checkpoint(Attempts(moment)))
    optimizer = next(iter(optimizers_of(moment.train_step).values()))
    assert rate_of(optimizer) == pytest.approx(1e-6)


@pytest.mark.slow
def test_a_weight_that_was_never_finite_has_not_diverged(tmp_path, tried):
    tried(Kind.ANOTHER_BATCH, Kind.LEARNING_RATE)

    def made():
        loop = tenfold(tmp_path)
        loop.train_step.model.weights[1].assign([np.inf])
        return loop

    made().run(2)
    found = explain(made(), 2)
    assert (found.blame, found.lost_weight[1]) == ("weights", 0)
    assert (found.growth, found.learning_rates) == (None, None)
    assert not any(one.since_checkpoint for one in found.remedies)
    assert (found.where, found.layer, found.kind) == ("weights", "only", "inf")
    assert found.lost_weight[0].endswith("only/bias")


def test_a_weight_that_is_lost_is_named():
    weights = [tf.Variable([1.0], name="whole"), keras.Variable(np.array([1.0, np.inf]), name="lost")]
    moment = types.SimpleNamespace(at_checkpoint=contextlib.nullcontext, began_at=20, train_step=lambda batch: {})
    assert lost_weight(types.SimpleNamespace(moment=moment, own_variables=weights[:1])) is None
    assert lost_weight(types.SimpleNamespace(moment=moment, own_variables=weights)) == ("lost", 20)


def one_layer():
    keras.utils.set_random_seed(1)
    return planted.dense(planted.plain(1, "out"))


def far_off(run, optimizer=None):
    """A rate that is a million times one that trains."""
    step = loops.TrainStep(
        one_layer(),
        squared_error,
        optimizer or keras.optimizers.SGD(1e6),
        loss_scaler=scaler.LossScaler(scaler.Dynamic(2.0**10)),
    )
    return planted.loop_of(step, planted.inputs(16, 8), planted.inputs(16, 1), run)


@pytest.fixture(scope="module")
def diverged(tmp_path_factory):
    run = tmp_path_factory.mktemp("far_off")
    far_off(run).run(5)
    return run


def rates_of(found):
    return [one for one in found.remedies if one.kind is Kind.LEARNING_RATE]


@pytest.mark.slow
def test_a_rate_that_is_wrong_by_far_is_found(diverged, tried):
    tried(Kind.ANOTHER_BATCH, Kind.LEARNING_RATE, rates=(0.01, 0.001))
    found = explain(far_off(diverged), 2)
    (helps,) = (one for one in rates_of(found) if one.helps)
    assert helps.name == "1e-06 of the learning rate for the last 1 step"
    assert helps.advice == "Lower the learning rate to 1e-06 of its value, which is 1."
    assert (found.blame, found.grown_through, found.growth) == ("weights", "learning rate", None)
    # Each that was tried is told of, and none twice.
    assert len(rates_of(found)) == 3


@pytest.mark.slow
def test_a_rate_that_was_not_tried_is_not_said_to_help(diverged, monkeypatch, tried):
    """Where no rate helped, what was measured is told: the first step was the last to be applied."""
    tried(Kind.ANOTHER_BATCH, Kind.LEARNING_RATE, rates=(0.1,))
    monkeypatch.setattr(case, "_USUAL", 1e9)
    found = explain(far_off(diverged), 4)
    assert not any(one.helps for one in rates_of(found))
    assert (found.growth.step, found.growth.learning_rate) == (1, 1e6)
    assert found.growth.moved > 1e4


@pytest.mark.slow
def test_while_a_run_goes_on_the_rates_of_earlier_steps_are_no_remedy(tmp_path, tried):
    tried(Kind.ANOTHER_BATCH, Kind.LEARNING_RATE)
    here, loop = loops.Explain(), far_off(tmp_path)
    loop.actions.append(here)
    loop.run(2)
    (one,) = here.explanations
    assert (one.step, rates_of(one)) == (2, [])
    assert (one.growth.moved, one.growth.learning_rate) == (None, 1e6)
    assert one.sentence.endswith("were not tried: `halfstep explain` repeats these steps.")


@pytest.mark.slow
def test_an_update_that_leaves_nothing_of_the_weights_does_not_help(tmp_path, tried):
    """Adam at 1e4 is held back at the first step; at 10 the step is finite, and moves the weights far away."""
    tried(Kind.LEARNING_RATE, rates=(0.001,))
    far_off(tmp_path, keras.optimizers.Adam(1e4)).run(1)
    found = explain(far_off(tmp_path, keras.optimizers.Adam(1e4)), 1)
    assert found.verdict == "update"
    (*no_help, helps) = rates_of(found)[1:] + rates_of(found)[:1]
    assert (helps.name, helps.helps) == ("1e-06 of the learning rate", True)
    assert helps.advice.endswith("1e-06 of its value, which is 0.01.")
    assert not any(one.helps for one in no_help)
    assert [one.why_not for one in no_help if one.finite]
    assert all("times as large as the weights" in one.why_not for one in no_help if one.finite)


@pytest.mark.slow
def test_the_schedule_of_a_compiled_step_of_ones_own_is_changed(tmp_path, tried):
    """Its first trace has the schedule as it was."""
    tried(Kind.ANOTHER_BATCH, Kind.LEARNING_RATE, rates=(0.001,))

    def made():
        model, loss_scaler = one_layer(), scaler.LossScaler(scaler.Dynamic(2.0**10))
        optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(1e6, 10, 0.9))

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = squared_error(y, model(x, training=True))
                scaled = loss_scaler.scale(loss)
            grads = tape.gradient(scaled, model.trainable_variables)
            return {"loss": loss, "applied": loss_scaler.apply(optimizer, grads, model.trainable_variables).finite}

        return planted.loop_of(step, planted.inputs(16, 8), planted.inputs(16, 1), tmp_path)

    made().run(2)
    found = explain(made(), 2)
    (helps,) = (one for one in rates_of(found) if one.helps)
    assert (helps.name, helps.advice) == (
        "1e-06 of the learning rate for the last 1 step",
        "Lower the learning rate to 1e-06 of its value.",
    )


@pytest.mark.slow
def test_the_rate_of_the_part_that_failed_is_tried(tmp_path, tried):
    """Also of one that does not take its turn in each of the steps that are repeated."""
    tried(Kind.ALL_IN_FLOAT32, Kind.LEARNING_RATE, rates=(0.001,))

    def made():
        keras.utils.set_random_seed(1)
        return loop_of_parts(tmp_path, {"a": 0.001, "b": 1e6}, 2)

    made().run(4)
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    skipped = next(row["step"] for row in rows if not row["applied"])
    assert skipped == 4
    found = explain(made())
    assert found.step == skipped
    (helps,) = (one for one in rates_of(found) if one.helps)
    assert "of the learning rate of part 'b' for the last" in helps.name
    usual = np.median([row["b/loss"] for row in rows[: skipped - 1] if row["b/applied"]])
    assert helps.loss == pytest.approx(helps.loss_ratio * usual)
    assert found.grown_through == "learning rate"
    assert not any("'a'" in one.name for one in rates_of(found))
    assert all(one.why_not for one in found.remedies if one.kind is Kind.ALL_IN_FLOAT32 and one.finite)


@pytest.mark.slow
def test_steps_are_repeated_with_their_own_turns(tmp_path, tried):
    """A part's turn in the step explained is no reason to let it move in those before."""
    tried(Kind.LEARNING_RATE, rates=(0.1,))
    rates = {"a": 0.001, "b": 3.0}
    loop_of_parts(tmp_path, rates, 2).run(4)
    attempts = Attempts(rewind(loop_of_parts(tmp_path, rates, 2), 4, at_least=10))
    attempts.part = "b"
    loss = float(try_since_checkpoint(attempts)[0].loss)
    # The same by hand: the part moves in step 2 alone, at a tenth of its rate.
    keras.utils.set_random_seed(1)
    by_hand = composed({"a": 0.001, "b": 0.3}, 2)
    for _ in range(4):
        outputs = by_hand(PAIR)
    assert loss == pytest.approx(float(outputs["b/loss"]), rel=1e-3)
