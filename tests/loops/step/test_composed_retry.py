"""Guards `ComposedStep(retry=True)`: the run of a scale that never overflows, to the bit, and only who overflowed."""

import contextlib
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from composed_cases import Players, batches
from mirrored import mirrored
from rigs import raw

import loops
import scaler

LOW, HIGH, STEPS = 2.0**6, 2.0**126, 5
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


def players(shape, scale, replicas=1, **arguments):
    keras.utils.set_random_seed(1)
    with mirrored(2).scope() if replicas == 2 else contextlib.nullcontext():
        return Narrow(shape, strategy=strategy_from(scale), retry=True, momentum=0.5, **arguments)


def steep(count=STEPS):
    """Batches whose gradients overflow at the highest scale."""
    for x, y, push in batches(count):
        yield x, 32.0 * y, 32.0 * push


def outputs_of(here, mode, replicas=1):
    step = here.step
    if replicas == 2:

        def step(given):
            x, y, push = given
            return mirrored(2).run(lambda: here.step((x, y, _of_this_replica(push))))

    call = step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")
    seen = [call(tuple(map(tf.constant, one))) for one in steep()]
    own = [{name: mirrored(2).experimental_local_results(one) for name, one in each.items()} for each in seen]
    assert all(
        len({float(part) for part in one[name]}) == 1
        for one in own
        for name in one
        if name.endswith(("retries", "applied"))
    )
    return [{name: np.asarray(parts[0]) for name, parts in one.items()} for one in own]


def _of_this_replica(push):
    """One replica's actor has gradients a hundred times those of the other."""
    first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
    return push * tf.where(first, 0.01, 1.0)


def end_of(here):
    return raw([*here.held("critic"), *here.held("actor"), *here.teacher.variables])


KINDS = [
    ("turns", 1, 1),
    ("turns", 2, 1),
    ("shared", 1, 1),
    ("shared", 2, 2),
    ("one scaler", 1, 1),
    ("one scaler", 1, 2),
]
NAMES = ["-".join(map(str, kind)) for kind in KINDS]


@pytest.mark.slow_with("turns-2-1-graph", "shared-2-2-eager", "one scaler-1-2-eager", "turns-1-1-eager")
@pytest.mark.exhaustive_with(
    "one scaler-1-2-eager",
    "turns-2-1-graph",
    "turns-1-1-eager",
    *(f"{name}-graph" for name in NAMES if name != "turns-2-1"),
)
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_a_run_from_too_high_a_scale_is_the_run_from_a_sound_one(kind, mode):
    """BatchNorm's statistics, the masks of a Dropout, the teacher and the losses too."""
    shape, every, accumulate = kind
    ends = []
    for scale in (LOW, HIGH):
        here = players(shape, scale, every=every, accumulate=accumulate)
        seen = outputs_of(here, mode)
        ends.append((end_of(here), [one[f"{name}/loss"].tobytes() for one in seen for name in ("critic", "actor")]))
        assert [bool(one["applied"]) for one in seen] == [bool(one["attempted"]) for one in seen]
    scalers = {id(one): name for name, one in here.step.scalers.items()}.values()
    assert all(sum(int(one[f"{name}/retries"]) for one in seen) > 0 for name in scalers)
    assert [int(one["retries"]) for one in seen] == [
        sum(int(one[f"{name}/retries"]) for name in scalers) for one in seen
    ]
    for name in scalers:
        last = [float(one[f"{name}/loss_scale"]) for one in seen][-1]
        assert float(here.step.scalers[name].loss_scale) == last < HIGH
        assert int(here.step.scalers[name].counters.skipped) == 0
    assert ends[0] == ends[1]


@pytest.mark.slow
@pytest.mark.exhaustive_with("one scaler-1-2", "one scaler-1-1", "shared-1-1", "shared-2-2", "turns-1-1")
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_replicas_retry_together_whoever_overflowed(kind):
    shape, every, accumulate = kind
    ends = []
    for scale in (LOW, HIGH):
        here = players(shape, scale, replicas=2, every=every, accumulate=accumulate)
        seen = outputs_of(here, "graph", replicas=2)
        ends.append(end_of(here))
    assert sum(int(one["actor/retries"]) for one in seen) > 0
    assert [bool(one["applied"]) for one in seen] == [bool(one["attempted"]) for one in seen]
    assert ends[0] == ends[1]


@pytest.mark.slow
@pytest.mark.exhaustive_with("turns", "one scaler", "shared")
@pytest.mark.parametrize(
    ("shape", "every"), [("turns", 2), ("shared", 1), ("one scaler", 1)], ids=["turns", "shared", "one scaler"]
)
def test_xla_retries_to_the_same_values(shape, every):
    """It compiles a pass that is repeated apart, and rounds it otherwise."""
    ends = []
    for scale in (LOW, HIGH):
        here = players(shape, scale, every=every, dropout=0.0)
        call = tf.function(here.step, jit_compile=True)
        seen = [call(tuple(map(tf.constant, one))) for one in [*steep(2)]]
        ends.append([*here.held("critic"), *here.held("actor")])
    assert sum(int(one["critic/retries"]) for one in seen) > 0
    assert sum(int(one["actor/retries"]) for one in seen) > 0
    for low, high in zip(*ends, strict=True):
        np.testing.assert_allclose(np.asarray(low), np.asarray(high), rtol=1e-3, atol=1e-3)


class Pair:
    """Two weights with a float16 line each, of one pass: that of the second is as steep as the batch says."""

    def __init__(self, **arguments):
        self.weights = [tf.Variable([0.0]), tf.Variable([0.0])]
        parts = [
            loops.Part(name, weight, _item(place), keras.optimizers.SGD(2.0**-20), **own)
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


def _item(place):
    return lambda found: found[place]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_only_the_part_that_overflowed_takes_its_gradients_again(mode):
    scalers = [scaler.LossScaler(scaler.Dynamic(2.0**12), name=name) for name in "ab"]
    pair = Pair(own=[{"loss_scaler": one} for one in scalers])
    step = pair.step if mode == "eager" else tf.function(pair.step)
    outputs = step(tf.constant([1.0, 2.0**10]))
    assert [int(outputs[name]) for name in ("a/retries", "b/retries", "retries")] == [0, 7, 7]
    assert [float(outputs[f"{name}/loss_scale"]) for name in "ab"] == [2.0**12, 2.0**5]
    assert [float(one.loss_scale) for one in scalers] == [2.0**12, 2.0**5]
    assert [float(one[0]) for one in pair.weights] == [-(2.0**-20), -(2.0**-10)]
    # A loss that is not finite is skipped as ever, and costs no scale.
    outputs = step(tf.constant([1.0, np.inf]))
    assert [bool(outputs[f"{name}/applied"]) for name in "ab"] == [True, False]
    assert [int(outputs[f"{name}/retries"]) for name in "ab"] == [0, 0]
    assert [float(one.loss_scale) for one in scalers] == [2.0**12, 2.0**5]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_with_one_scaler_all_take_theirs_again(mode):
    pair = Pair(loss_scaler=scaler.LossScaler(scaler.Dynamic(2.0**12)))
    step = pair.step if mode == "eager" else tf.function(pair.step)
    outputs = step(tf.constant([1.0, 2.0**10]))
    assert [int(outputs[name]) for name in ("a/retries", "b/retries", "retries")] == [7, 7, 7]
    assert [float(outputs[f"{name}/loss_scale"]) for name in "ab"] == [2.0**5] * 2
    assert [float(one[0]) for one in pair.weights] == [-(2.0**-20), -(2.0**-10)]


@pytest.mark.exhaustive
def test_a_dropout_that_two_losses_share_drops_the_same_again():
    """Each loss function moves its seed, so that the second one's mask depends on the first one's call."""
    ends = []
    for scale in (LOW, HIGH):
        keras.utils.set_random_seed(1)
        drop, weights = keras.layers.Dropout(0.5, seed=1), [tf.Variable(tf.ones([32])), tf.Variable(tf.ones([32]))]
        drop.build([32])
        calls = tf.Variable(0, trainable=False)

        def loss(place, weights=weights, drop=drop, calls=calls):
            def of(x):
                calls.assign_add(1)
                return tf.reduce_sum(drop(weights[place] * x, training=True))

            return of

        parts = [
            loops.Part(
                name,
                [weights[place], drop],
                loss(place),
                keras.optimizers.SGD(0.1),
                loss_scaler=scaler.LossScaler(strategy_from(scale)(), name=name),
            )
            for place, name in enumerate("ab")
        ]
        step = tf.function(loops.ComposedStep(parts, lambda x: x, retry=True))
        outputs = [step(tf.fill([32], 64.0)) for _ in range(2)]
        ends.append(raw([*weights, *drop.variables, calls]))
        assert int(calls) == 4
    assert min(int(outputs[0]["a/retries"]), int(outputs[0]["b/retries"])) > 0
    assert ends[0] == ends[1]


def test_a_random_generator_in_a_turn_draws_the_same_again():
    """The pass lies in a branch, and what it draws from is put back for the retry."""
    ends = []
    for scale in (LOW, HIGH):
        random, weight = tf.random.Generator.from_seed(3), tf.Variable(tf.ones([4]))
        made = scaler.LossScaler(strategy_from(scale)())

        def loss(x, random=random, weight=weight):
            return tf.reduce_sum(weight * x * (1.0 + random.uniform([4])))

        part = loops.Part("a", weight, loss, keras.optimizers.SGD(0.1), loss_scaler=made, every=2)
        step = tf.function(loops.ComposedStep([part], retry=True))
        outputs = [step(tf.fill([4], 64.0)) for _ in range(4)]
        ends.append(raw([weight, random.state]))
    assert [int(one["a/retries"]) > 0 for one in outputs] == [False, True, False, False]
    assert ends[0] == ends[1]


@tf.custom_gradient
def never_zero(x):
    return tf.identity(x), lambda upstream: tf.where(tf.equal(upstream, 0.0), np.float32(np.inf), upstream)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_part_whose_turn_it_is_not_takes_nothing_again(mode):
    """Its loss counts as zero, and what the backward pass makes of that means nothing."""
    weight, made = tf.Variable(1.0), scaler.LossScaler(scaler.Dynamic(2.0**10))
    part = loops.Part(
        "a", weight, lambda x: never_zero(weight * x), keras.optimizers.SGD(0.5), loss_scaler=made, every=2
    )
    step = loops.ComposedStep([part], lambda x: x, retry=True)
    step = step if mode == "eager" else tf.function(step)
    seen = [step(tf.constant(1.0)) for _ in range(2)]
    assert [int(one["a/retries"]) for one in seen] == [0, 0]
    assert [bool(one["a/applied"]) for one in seen] == [False, True]
    assert float(made.loss_scale) == 2.0**10
    assert float(weight) == 0.5


def test_what_cannot_be_retried_is_refused():
    weight = tf.Variable(1.0)

    def step(draw, **arguments):
        part = loops.Part("a", weight, lambda x: weight * draw(x), keras.optimizers.SGD(0.1), **arguments)
        return tf.function(loops.ComposedStep([part], retry=True))

    with pytest.raises(scaler.InvalidArgument, match=r"retry='yes'.*True or False"):
        loops.ComposedStep([loops.Part("a", weight, lambda x: weight, keras.optimizers.SGD(0.1))], retry="yes")
    with pytest.raises(scaler.InvalidArgument, match=r"gradients of 'a' can be taken only once.*tf.random.Generator"):
        step(lambda x: tf.random.normal([]), every=2, loss_scaler=scaler.LossScaler())(tf.constant(1.0))
    python = step(lambda x: tf.py_function(lambda y: 2.0 * y, [x], tf.float32), loss_scaler=scaler.LossScaler())
    with pytest.raises(scaler.InvalidArgument, match="can be taken only once"):
        python(tf.constant(1.0))


@pytest.mark.exhaustive
def test_a_log_and_an_explanation_know_the_retries(tmp_path):
    log, data = tmp_path / "steps.jsonl", tuple(np.stack(part) for part in zip(*steep(), strict=True))

    def run():
        keras.utils.clear_session()
        actions = [loops.JsonLines(log), loops.Checkpoint(tmp_path / "checkpoints", every=5, resume=True)]
        dataset = tf.data.Dataset.from_tensor_slices(data)
        return loops.Loop(players("shared", HIGH).step, dataset, steps_per_call=5, actions=actions)

    (loop := run()).run(5)
    assert (loop.counters.attempted, loop.counters.applied) == (5, 5)
    first, *_ = map(json.loads, log.read_text().splitlines())
    assert first["retries"] == first["critic/retries"] + first["actor/retries"] > 0
    found = loops.observe.explain(run(), step=1)
    assert (found.verdict, found.loss_scale) == ("healthy", HIGH)
    assert found.retried == (first["critic/retries"], first["critic/loss_scale"])
    assert "was retried" in found.sentence
