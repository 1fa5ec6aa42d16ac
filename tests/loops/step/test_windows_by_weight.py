"""Windows that differ: by the weight of micro-batches, by a schedule, and at the end of a run.

Each is compared with one large batch, differentiated by hand in float32.
"""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_cases import afresh, static
from mirrored import mirrored
from models import squared_error

import loops
import scaler
from loops.run.rewind.rewind import rewind

TOKENS, SIZES = 4, {0: 1, 2: 2, 4: 3}


def model(policy="float32"):
    """One layer, whose penalty a micro-batch without weight leaves out."""
    keras.utils.set_random_seed(0)
    penalty = keras.regularizers.L2(0.1)
    dense = keras.layers.Dense(2, use_bias=False, kernel_regularizer=penalty, dtype=policy)
    return keras.Sequential([keras.Input((3,)), dense])


def by_tokens(y, prediction):
    """The sum over what a mask leaves, and how much that is. The mask is the third column of y."""
    mask = tf.cast(y[:, 2], tf.float32)
    each = tf.reduce_mean(tf.square(tf.cast(prediction, tf.float32) - y[:, :2]), axis=-1)
    return loops.WeightedLoss(tf.reduce_sum(each * mask), tf.reduce_sum(mask))


def unweighted(y, prediction):
    return squared_error(y[:, :2], prediction)


def micro_batch(number, tokens=TOKENS, bad=None):
    random = np.random.default_rng(number)
    x, y = random.normal(size=(TOKENS, 3)), random.normal(size=(TOKENS, 2))
    mask = np.arange(TOKENS)[:, np.newaxis] < tokens
    x[0] = x[0] if bad is None else bad
    return x.astype(np.float32), np.concatenate([y, mask], axis=1).astype(np.float32)


def large(batches):
    return tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))


def dataset(batches, replicas=1):
    return tf.data.Dataset.from_tensor_slices(large(batches)).batch(TOKENS * replicas, drop_remainder=True)


def by_hand(of, batches):
    """The mean over all tokens and its gradient, in float32; 0 where there is nothing to learn from."""
    x, y = large(batches)
    with tf.GradientTape() as tape:
        found = by_tokens(y, of(x, training=True))
        loss = found.total / found.weight + sum(tf.cast(one, tf.float32) for one in of.losses)
    grads = tape.gradient(loss, of.trainable_variables)
    return (loss, grads) if found.weight else (0.0, [tf.zeros_like(one) for one in grads])


@functools.cache
def loss_of(number, tokens):
    """That of one micro-batch, before any step."""
    return by_hand(model(), [micro_batch(number, tokens)])[0]


def train_step(loss=by_tokens, policy="float32", scale=64.0, **arguments):
    """Of plain SGD with a rate of 1, which moves a weight by its gradient."""
    return loops.TrainStep(model(policy), loss, keras.optimizers.SGD(1.0), loss_scaler=static(scale), **arguments)


@contextlib.contextmanager
def moves(step):
    """By how much the block has moved each weight, which is then put back."""
    weights = [*(step.masters.weights if step.masters else step.model.trainable_variables)]
    before, moved = [weight.numpy() for weight in weights], []
    yield moved
    moved += [old - new.numpy() for old, new in zip(before, weights, strict=True)]
    for weight, old in zip(weights, before, strict=True):
        weight.assign(old)


def assert_large_batch(step, call, batches, rtol=1e-4, atol=1e-6):
    """The batches make a window that moves the weights as one large batch does; gives the outputs of each."""
    expected = by_hand(step.model, batches)[1]
    with moves(step) as moved:
        outputs = [call(one) for one in batches]
    assert outputs[-1]["applied"]
    for one, other in zip(moved, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)
    return outputs


def assert_skipped(step, call, batches):
    with moves(step) as moved:
        outputs = [call(one) for one in batches][-1]
    assert outputs["attempted"]
    assert not outputs["applied"]
    assert not np.any(moved)


@pytest.fixture(scope="module")
def of_three():
    step = train_step(accumulate=3, last_window="apply")
    return step, tf.function(step)


@settings(max_examples=25)
@given(tokens=st.lists(st.integers(0, TOKENS), min_size=1, max_size=3))
def test_micro_batches_of_any_weights_are_the_large_batch(of_three, tokens):
    """Also where the window ends before it is full."""
    step, call = of_three

    def take(one):
        if one is batches[-1]:
            step.end_window()
        return call(one)

    batches = [micro_batch(number, count) for number, count in enumerate(tokens)]
    outputs = assert_large_batch(step, take, batches)
    assert not any(one["attempted"] for one in outputs[:-1])
    expected = [loss_of(number, count) for number, count in enumerate(tokens)]
    np.testing.assert_allclose([one["loss"] for one in outputs], expected, rtol=1e-5)


def test_weights_in_16_bits():
    step = train_step(policy="float16", accumulate=2)
    assert_large_batch(step, step, [micro_batch(0, 1), micro_batch(1, 4)], rtol=2e-2, atol=2e-2)


def test_a_bad_micro_batch_of_any_weight_skips_its_window(of_three):
    step, call = of_three
    assert_skipped(step, call, [micro_batch(0, 2), micro_batch(1, 3, bad=np.inf), micro_batch(2, 0)])
    assert_large_batch(step, call, [micro_batch(number, 2) for number in range(3)])


@pytest.mark.parametrize("arguments", [{}, {"accumulate": 2, "last_window": "apply"}], ids=["alone", "window"])
def test_a_weight_that_cannot_be_skips(arguments):
    weights = iter([-1.0, np.nan, np.inf])
    step = train_step(lambda y, prediction: loops.WeightedLoss(unweighted(y, prediction), next(weights)), **arguments)
    for _ in range(3):
        if arguments:
            step.end_window()
        assert_skipped(step, step, [micro_batch(0)])


def test_without_accumulation_a_weighted_loss_is_its_mean():
    step = train_step()
    for tokens in (3, 0):
        assert_large_batch(step, step, [micro_batch(0, tokens)])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_that_differ_between_replicas(accumulate):
    """Also where one of them, or both have nothing to learn from; and a window goes on in the next run."""
    batches = [micro_batch(number, count) for number, count in enumerate([4, 1, 0, 3, 0, 0, 0, 0])]
    strategy, seen = mirrored(2), []
    with strategy.scope():
        step = train_step(accumulate=accumulate)
    loop = loops.Loop(step, dataset(batches, 2), strategy=strategy, steps_per_call=1, actions=[seen.append])
    for begin in (0, accumulate):
        own = batches[2 * begin : 2 * (begin + accumulate)]
        expected = by_hand(step.model, own)[1]
        losses = [by_hand(step.model, own[at : at + 2])[0] for at in range(0, len(own), 2)]
        with moves(step) as moved:
            for number in range(accumulate):
                loop.run(begin + number + 1)
        np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-6)
        for number, (visit, loss) in enumerate(zip(seen[begin:], losses, strict=True), 1):
            np.testing.assert_allclose(visit.outputs["loss"], [loss], rtol=1e-5)
            assert visit.outputs["attempted"] == [number == accumulate]


@pytest.fixture(scope="module")
def may_end():
    """A step without weights in a graph that may end its window."""
    step = train_step(unweighted, accumulate=3, last_window="apply")

    @tf.function
    def take(batch, ends):
        if ends:
            step.end_window()
        return step(batch)

    return step, take


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_last_window_is_the_mean_of_what_it_has(may_end, length):
    """A graph ends it, and the next one is whole."""
    step, take = may_end
    for count in (length, 3):
        ends = iter([number == length - 1 and count == length for number in range(count)])
        batches = [micro_batch(number) for number in range(count)]
        outputs = assert_large_batch(step, lambda one, ends=ends: take(one, tf.constant(next(ends))), batches)
        assert [bool(one["attempted"]) for one in outputs] == [number == count - 1 for number in range(count)]


def decided(loop, goals):
    """At which of the steps something was decided, in a loop that runs to each goal in turn."""
    attempted = []

    def note(visit):
        first = visit.counters.data - len(visit.outputs["attempted"]) + 1
        attempted.extend(first + place for place, one in enumerate(visit.outputs["attempted"]) if one)

    loop.actions.append(note)
    for goal in goals:
        loop.run(goal)
    loop.actions.remove(note)
    return attempted


@pytest.fixture(scope="module")
def of_four():
    step = train_step(accumulate=4, last_window="apply")
    return afresh(step, dataset([micro_batch(0)]).repeat(), steps_per_call=50)


def test_a_run_ends_its_last_window(of_four):
    """Also one that its only step begins; and that of a step that somebody wrote around it."""
    data, inner = dataset([micro_batch(0)]).repeat(), train_step(accumulate=4, last_window="apply")
    assert decided(of_four(data), [1, 7, 8, 15]) == [1, 5, 7, 8, 12, 15]
    tf.config.run_functions_eagerly(True)
    assert decided(loops.Loop(lambda batch: inner(batch), data, steps_per_call=1), [1, 6]) == [1, 5, 6]


def test_a_dataset_that_ends_before_the_goal_ends_the_window_if_it_knows(of_four):
    data = dataset([micro_batch(number) for number in range(6)])
    loop = of_four(data)
    for attempted in (2, 1):
        with pytest.raises(loops.OutOfData):
            loop.run(100)
        assert loop.counters.attempted == attempted
        loop.restart(data.filter(lambda x, y: True), [])


@pytest.fixture(scope="module")
def scheduled():
    """In the graph."""
    return afresh(train_step(accumulate=SIZES), dataset([micro_batch(0)]).repeat(), steps_per_call=50)


def test_a_scheduled_window_is_the_large_batch_and_waits_at_a_skip(scheduled):
    batches = [micro_batch(number, 4 - number % 3, bad=np.nan if number == 3 else None) for number in range(11)]
    loop, done = scheduled(dataset(batches).repeat()), 0
    step = loop.train_step
    assert (step.accumulate, step.windows) == (3, SIZES)
    for length in (1, 1, 2, 2, 2, 3):
        window = batches[done : done + length]
        done += length
        expected = by_hand(step.model, window)[1]
        with moves(step) as moved:
            assert decided(loop, [done]) == [done]
        np.testing.assert_allclose(moved, np.zeros_like(moved) if done == 4 else expected, rtol=1e-4, atol=1e-6)
    assert loop.counters == loops.Counters(11, 6, 5)


def test_a_schedule_goes_on_in_its_window_and_changes_by_name(scheduled, tmp_path):
    data = dataset([micro_batch(0)]).repeat()

    def checkpoint(*changed):
        return loops.Checkpoint(tmp_path, every=100, resume=True, changed=changed)

    assert decided(scheduled(data, checkpoint()), [3]) == [1, 2]
    assert decided(scheduled(data, checkpoint()), [8]) == [4, 6]
    tf.config.run_functions_eagerly(True)  # What is refused and dropped does not depend on who takes the steps.
    loop = loops.Loop(train_step(accumulate=4), data, actions=[checkpoint()], steps_per_call=1)
    with pytest.raises(loops.CheckpointError, match="accumulate was"):
        loop.run(12)
    loop.restart(data, [checkpoint("accumulate")])
    assert decided(loop, [12]) == [12]
    assert "window that is open after micro-batch 2 is dropped" in loop.resumed.changes[0]


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("accumulate", {"accumulate": one})
        for one in (0, {}, {1: 2}, {0: 0}, {0: 1, 2.5: 4}, {0: True}, {-1: 2, 0: 1}, "4")
    ]
    + [("last_window", {"last_window": "drop", "accumulate": 2}), ("last_window", {"last_window": "apply"})]
    + [("last_window", {"last_window": None})],
)
def test_windows_that_cannot_be_are_refused(named, arguments):
    with pytest.raises(scaler.InvalidArgument, match=named):
        train_step(**arguments)


def test_only_a_built_step_that_applies_short_windows_ends_them():
    with pytest.raises(scaler.InvalidArgument, match="keeps windows that are not full"):
        train_step(accumulate=2).end_window()
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(scaler.InvalidArgument, match="is not built"):
        loops.TrainStep(unbuilt, by_tokens, "sgd", accumulate=2, last_window="apply").end_window()


@pytest.mark.parametrize("weight", [None, "3", (1.0, 2.0), np.ones(TOKENS, np.float32)])
def test_a_weight_that_is_no_scalar_is_refused(weight):
    with pytest.raises(loops.BadOutputs, match="weight="):
        train_step(lambda y, prediction: loops.WeightedLoss(1.0 * tf.reduce_sum(prediction), weight))(micro_batch(0, 2))


def test_where_weights_do_not_fit():
    two = {"one": by_tokens, "other": by_tokens}
    inputs = keras.Input((3,))
    both = keras.Model(inputs, {"one": keras.layers.Dense(2)(inputs), "other": keras.layers.Dense(2)(inputs)})
    x, y = micro_batch(0, 2)
    with pytest.raises(loops.BadOutputs, match="one function of all outputs"):
        loops.TrainStep(both, two, "sgd")((x, {"one": y, "other": y}))
    own = model()
    part = loops.Part("own", own, lambda pair: by_tokens(pair[1], own(pair[0])), keras.optimizers.SGD(0.1))
    with pytest.raises(loops.BadOutputs, match="which only a TrainStep takes"):
        loops.ComposedStep([part])((x, y))


def test_noise_needs_windows_of_one_length():
    own = model()
    probes = scaler.observe.watch(own, kinds=["noise_scale"])
    step = loops.TrainStep(own, by_tokens, "sgd", accumulate=SIZES, probes=probes)
    with pytest.raises(scaler.InvalidArgument, match="two batch sizes"):
        step(micro_batch(0, 2))


@pytest.mark.usefixtures("eagerly")
def test_progress_says_once_what_batch_norm_sees(capsys):
    own = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(scale=False)])
    step = loops.TrainStep(own, squared_error, "sgd", accumulate=2)
    loop = loops.Loop(step, dataset([micro_batch(0)]).repeat(), steps_per_call=1, actions=[loops.Progress()])
    loop.run(1)
    loop.run(2)
    assert capsys.readouterr().err.count("BatchNorm's statistics are those of each micro-batch") == 1


def test_a_guard_judges_the_loss_of_the_whole_window():
    """A light micro-batch with a large loss is no spike, and a heavy one is."""

    def scaled(y, prediction):
        return loops.WeightedLoss(y[0, 0] * y[0, 1] + 0.0 * tf.reduce_sum(prediction), y[0, 1])

    def batch_of(loss, weight):
        return np.ones((1, 3), np.float32), np.array([[loss, weight]], np.float32)

    guard = scaler.SpikeGuard(scaler.Static(1.0), window=5, norm=False)
    own = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    step = loops.TrainStep(own, scaled, keras.optimizers.SGD(0.0), loss_scaler=guard, accumulate=2, last_window="apply")

    def applied(*pairs):
        for pair in pairs[:-1]:
            step(batch_of(*pair))
        step.end_window()
        return bool(step(batch_of(*pairs[-1]))["applied"])

    for _ in range(5):
        assert applied((1.0, 1000.0), (1.0, 1.0))
    assert float(step.loss_scaler.state.loss_usual) == 1.0
    assert applied((1.0, 1000.0), (8.0, 1.0))
    assert not applied((8.0, 1000.0), (1.0, 1.0))
    assert applied((1.0, 1.0))  # A short window has its own mean, and not a half of it.
    assert float(step.loss_scaler.state.losses[-1]) == 1.0
    assert not applied((8.0, 1.0))


@pytest.mark.usefixtures("eagerly")
def test_a_replay_ends_windows_where_the_run_did(tmp_path):
    actions = [loops.JsonLines(tmp_path / "steps.jsonl"), loops.Checkpoint(tmp_path / "checkpoints", every=2, keep=100)]
    data = dataset([micro_batch(number, 3) for number in range(5)]).repeat()
    loop = loops.Loop(train_step(accumulate=2, last_window="apply"), data, steps_per_call=1, actions=actions)
    for goal in (3, 4):
        loop.run(goal)
    found = rewind(loop, 4)
    assert found.reproduced, found.differs
    assert bool(found.outputs()["attempted"])
    assert found.logged["attempted"]


def test_keras_takes_no_weighted_loss_and_a_function_returns_one():
    """As a tuple Keras took the mean of the total and the weight."""
    own = model()
    own.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1)), loss=by_tokens, run_eagerly=True)
    with pytest.raises((TypeError, ValueError, AttributeError)):
        own.train_on_batch(*micro_batch(0, 2))
    found = tf.function(by_tokens)(micro_batch(0, 3)[1], tf.zeros([TOKENS, 2]))
    assert isinstance(found, loops.WeightedLoss)
    assert float(found.weight) == 3.0
