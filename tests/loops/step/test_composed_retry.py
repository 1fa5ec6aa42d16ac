"""Guards `ComposedStep(retry=True)`: the run of a scale that never overflows, to the bit, and only who overflowed."""

import json
import operator

import keras
import numpy as np
import pytest
import tensorflow as tf
from composed_cases import Players, batches
from mirrored import mirrored, one_for_each
from rigs import raw
from step_cases import part, tensors

import loops
import scaler

LOW, HIGH = 2.0**6, 2.0**108
BITS = 2.0**-126, 2.0**126
"""Of float32, in which a power of two changes no bit: float16 rounds what it flushes."""


def strategy_from(scale):
    return lambda: scaler.Dynamic(scale, min_scale=BITS[0], max_scale=BITS[1])


@tf.custom_gradient
def narrow(x):
    """The same, with a gradient that overflows earlier than float32, so that a sum over replicas has room."""
    return tf.identity(x), lambda upstream: tf.where(tf.abs(upstream) > 2.0**100, np.float32(np.inf), upstream)


class Narrow(Players):
    """The players, whose pass backward overflows at the critic's value."""

    def forward(self, given):
        value, rest = super().forward(given)
        return narrow(value), rest


def players(shape, **arguments):
    """They begin at the low scale, with slots that are there already."""
    keras.utils.set_random_seed(1)
    here = Narrow(shape, strategy=strategy_from(LOW), retry=True, momentum=0.5, **arguments)
    for name, optimizer in here.optimizers.items():
        optimizer.build(getattr(here, name).trainable_variables)
    return here


def each_scaler(here):
    """The scalers by the name of a part that has it."""
    return {id(one): (name, one) for name, one in here.step.scalers.items()}.values()


def moved(here):
    return [*here.held("critic"), *here.held("actor"), *here.teacher.variables]


def runs(variables, scalers, call, batches):
    """The outputs of the run from the low scale and of that from the high one, and what each came to."""
    own = [*variables, *(variable for one in scalers for variable in one.variables)]
    start, found = [variable.numpy() for variable in own], []
    for scale in (LOW, HIGH):
        for variable, value in zip(own, start, strict=True):
            variable.assign(value)
        for one in scalers:
            one._state["loss_scale"].assign(scale)
        outputs = [call(one) for one in batches]
        seen = [{name: np.asarray(value) for name, value in one.items()} for one in outputs]
        found.append((seen, [np.asarray(variable).copy() for variable in variables]))
    return found


def runs_of(here, call, count=4):
    scalers = [one for _, one in each_scaler(here)]
    return runs(moved(here), scalers, call, list(map(tensors, batches(count))))


@pytest.mark.slow_with("shared-2-2")
@pytest.mark.parametrize(
    ("shape", "every", "accumulate"),
    [("turns", 2, 1), ("shared", 1, 1), ("shared", 2, 2)],
)
def test_a_run_from_too_high_a_scale_is_the_run_from_a_sound_one(shape, every, accumulate):
    """BatchNorm's statistics, the masks of a Dropout, the teacher and the losses too."""
    here = players(shape, every=every, accumulate=accumulate)
    (low, end), (seen, other_end) = runs_of(here, here.step, max(2, every * accumulate))
    assert [bool(one["applied"]) for one in low + seen] == [bool(one["attempted"]) for one in low + seen]
    retries = {name: [int(one[f"{name}/retries"]) for one in seen] for name, _ in each_scaler(here)}
    assert all(map(sum, retries.values()))
    assert [int(one["retries"]) for one in seen] == [sum(each) for each in zip(*retries.values(), strict=True)]
    for name, own in each_scaler(here):
        assert float(own.loss_scale) == float(seen[-1][f"{name}/loss_scale"]) < HIGH
        assert int(own.counters.skipped) == 0
    for name in ("critic/loss", "actor/loss"):
        assert [one[name].tobytes() for one in low] == [one[name].tobytes() for one in seen]
    assert raw(end) == raw(other_end)


@pytest.mark.exhaustive
def test_xla_retries_to_the_same_values():
    """It compiles a pass that is repeated apart, and rounds it otherwise."""
    here = players("turns", every=2, dropout=0.0)
    (_, end), (seen, other_end) = runs_of(here, tf.function(here.step, jit_compile=True), 2)
    assert all(sum(int(one[f"{name}/retries"]) for one in seen) > 0 for name in ("critic", "actor"))
    for low, high in zip(end, other_end, strict=True):
        np.testing.assert_allclose(low, high, rtol=1e-3, atol=1e-3)


class Pair:
    """Two weights with a float16 line each, of one pass: that of the second is as steep as the batch says."""

    def __init__(self, **arguments):
        self.weights = [tf.Variable([0.0]), tf.Variable([0.0])]
        parts = [
            part(name, weight, operator.itemgetter(place), keras.optimizers.SGD(2.0**-20), **own)
            for place, (name, weight, own) in enumerate(
                zip("ab", self.weights, arguments.pop("own", ({}, {})), strict=True)
            )
        ]
        self.step = loops.ComposedStep(parts, self.losses, retry=True, **arguments)

    def losses(self, slopes):
        lines = [
            tf.cast(one, tf.float16) * tf.cast(slope, tf.float16)
            for one, slope in zip(self.weights, tf.unstack(slopes), strict=True)
        ]
        return [tf.reduce_sum(tf.cast(line, tf.float32)) for line in lines]


def test_only_the_part_that_overflowed_takes_its_gradients_again():
    scalers = [scaler.LossScaler(scaler.Dynamic(2.0**12), name=name) for name in "ab"]
    pair = Pair(own=[{"loss_scaler": one} for one in scalers])
    outputs = pair.step(tf.constant([1.0, 2.0**10]))
    assert [int(outputs[name]) for name in ("a/retries", "b/retries", "retries")] == [0, 7, 7]
    assert [float(outputs[f"{name}/loss_scale"]) for name in "ab"] == [2.0**12, 2.0**5]
    assert [float(one.loss_scale) for one in scalers] == [2.0**12, 2.0**5]
    assert [float(one[0]) for one in pair.weights] == [-(2.0**-20), -(2.0**-10)]
    # A loss that is not finite is skipped as ever, and costs no scale.
    outputs = pair.step(tf.constant([1.0, np.inf]))
    assert [bool(outputs[f"{name}/applied"]) for name in "ab"] == [True, False]
    assert [int(outputs[f"{name}/retries"]) for name in "ab"] == [0, 0]
    assert [float(one.loss_scale) for one in scalers] == [2.0**12, 2.0**5]


@pytest.mark.slow
def test_replicas_take_the_gradients_of_a_part_again_together_whichever_overflowed():
    strategy, low = mirrored(2), 2.0**-20
    with strategy.scope():
        scalers = [scaler.LossScaler(scaler.Dynamic(2.0**12), name=name) for name in "ab"]
        pair = Pair(own=[{"loss_scaler": one} for one in scalers])

    @tf.function
    def call(slopes):
        outputs = strategy.run(pair.step, (slopes,))
        return {name: tf.stack(strategy.experimental_local_results(one)) for name, one in outputs.items()}

    for number, steep in enumerate((0, 1), 1):
        scalers[1]._state["loss_scale"].assign(2.0**12)
        slopes = [tf.constant([1.0, 2.0**10 if place == steep else 1.0]) for place in range(2)]
        outputs = call(one_for_each(strategy, slopes))
        assert [outputs[name].numpy().tolist() for name in ("a/retries", "b/retries")] == [[0, 0], [6, 6]]
        assert outputs["applied"].numpy().all()
        for weight, slope in zip(pair.weights, (1.0, (1.0 + 2.0**10) / 2.0), strict=True):
            assert [float(one[0]) for one in weight.values] == [-number * low * slope] * 2


def test_with_one_scaler_all_take_theirs_again():
    pair = Pair(loss_scaler=scaler.LossScaler(scaler.Dynamic(2.0**12)))
    outputs = pair.step(tf.constant([1.0, 2.0**10]))
    assert [int(outputs[name]) for name in ("a/retries", "b/retries", "retries")] == [7, 7, 7]
    assert [float(outputs[f"{name}/loss_scale"]) for name in "ab"] == [2.0**5] * 2
    assert [float(one[0]) for one in pair.weights] == [-(2.0**-20), -(2.0**-10)]


def test_a_random_generator_in_a_turn_draws_the_same_again():
    """The pass lies in a branch, and what it draws from is put back for the retry."""
    random, weight = tf.random.Generator.from_seed(3), tf.Variable(tf.ones([4]))
    made = scaler.LossScaler(strategy_from(LOW)())

    def loss(x):
        return tf.reduce_sum(weight * x * (1.0 + random.uniform([4])))

    own = part("a", weight, loss, loss_scaler=made, every=2)
    call = tf.function(loops.ComposedStep([own], retry=True))
    (_, end), (outputs, other_end) = runs([weight, random.state], [made], call, [tf.fill([4], 2.0**24)] * 4)
    assert [int(one["a/retries"]) > 0 for one in outputs] == [False, True, False, False]
    assert raw(end) == raw(other_end)


@tf.custom_gradient
def never_zero(x):
    return tf.identity(x), lambda upstream: tf.where(tf.equal(upstream, 0.0), np.float32(np.inf), upstream)


def test_a_part_whose_turn_it_is_not_takes_nothing_again():
    """Its loss counts as zero, and what the backward pass makes of that means nothing."""
    weight, made = tf.Variable(1.0), scaler.LossScaler(scaler.Dynamic(2.0**10))
    loss, optimizer = lambda x: never_zero(weight * x), keras.optimizers.SGD(0.5)
    own = part("a", weight, loss, optimizer, loss_scaler=made, every=2)
    step = loops.ComposedStep([own], lambda x: x, retry=True)
    seen = [step(tf.constant(1.0)) for _ in range(2)]
    assert [int(one["a/retries"]) for one in seen] == [0, 0]
    assert [bool(one["a/applied"]) for one in seen] == [False, True]
    assert float(made.loss_scale) == 2.0**10
    assert float(weight) == 0.5


@pytest.mark.exhaustive
def test_a_log_and_an_explanation_know_the_retries(tmp_path):
    log, data = tmp_path / "steps.jsonl", tuple(np.stack(one) for one in zip(*batches(5), strict=True))

    def run():
        keras.utils.clear_session()
        here = players("shared")
        for _, one in each_scaler(here):
            one._state["loss_scale"].assign(HIGH)
        actions = [loops.JsonLines(log), loops.Checkpoint(tmp_path / "checkpoints", every=5, resume=True)]
        dataset = tf.data.Dataset.from_tensor_slices(data)
        return loops.Loop(here.step, dataset, steps_per_call=5, actions=actions)

    (loop := run()).run(5)
    assert (loop.counters.attempted, loop.counters.applied) == (5, 5)
    first, *_ = map(json.loads, log.read_text().splitlines())
    assert first["retries"] == first["critic/retries"] + first["actor/retries"] > 0
    found = loops.observe.explain(run(), step=1)
    assert (found.verdict, found.loss_scale) == ("healthy", HIGH)
    assert found.retried == (first["critic/retries"], first["critic/loss_scale"])
    assert "was retried" in found.sentence
