"""Windows that differ: by the weight of micro-batches, by a schedule, and at the end of a run.

Each is compared with one large batch, differentiated by hand in float32.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_cases import static
from mirrored import mirrored
from models import squared_error

import halfstep as hs
import loops
import scaler
from loops.run.rewind.rewind import rewind

TOKENS, SIZES = 4, {0: 1, 2: 2, 4: 3}


def model(policy="float32"):
    keras.utils.set_random_seed(0)
    with contextlib.ExitStack() as stack:
        before = keras.config.dtype_policy()
        stack.callback(keras.config.set_dtype_policy, before)
        keras.config.set_dtype_policy(policy)
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])


def by_tokens(y, prediction):
    """The sum over what a mask leaves, and how much that is. The mask is the third column of y."""
    mask = tf.cast(y[:, 2], tf.float32)
    each = tf.reduce_mean(tf.square(tf.cast(prediction, tf.float32) - y[:, :2]), axis=-1)
    return loops.WeightedLoss(tf.reduce_sum(each * mask), tf.reduce_sum(mask))


def micro_batch(number, tokens, bad=None):
    random = np.random.default_rng(number)
    x, y = random.normal(size=(TOKENS, 3)), random.normal(size=(TOKENS, 2))
    mask = np.arange(TOKENS)[:, np.newaxis] < tokens
    x[0] = x[0] if bad is None else bad
    return x.astype(np.float32), np.concatenate([y, mask], axis=1).astype(np.float32)


def large(batches):
    return tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))


def gradient_by_hand(of, batches):
    """Of the mean over all tokens, in float32."""
    x, y = large(batches)
    with tf.GradientTape() as tape:
        found = by_tokens(y, of(x, training=True))
        loss = found.total / found.weight
    return tape.gradient(loss, of.trainable_variables)


def train_step(loss=by_tokens, policy="float32", scale=64.0, **arguments):
    """Of plain SGD with a rate of 1, which moves a weight by its gradient."""
    return loops.TrainStep(model(policy), loss, keras.optimizers.SGD(1.0), loss_scaler=static(scale), **arguments)


def moves(step, call, batches):
    """By how much the batches moved each weight, which is then put back, and the outputs of the last."""
    weights = [*(step.masters.weights if step.masters else step.model.trainable_variables)]
    before = [weight.numpy() for weight in weights]
    outputs = [call(one) for one in batches][-1]
    moved = [old - new.numpy() for old, new in zip(before, weights, strict=True)]
    for weight, old in zip(weights, before, strict=True):
        weight.assign(old)
    return moved, outputs


def assert_same(moved, expected, rtol=1e-4, atol=1e-6):
    for one, other in zip(moved, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


@pytest.fixture(scope="module")
def of_three():
    step = train_step(accumulate=3)
    return step, tf.function(step)


@settings(max_examples=25)
@given(tokens=st.lists(st.integers(0, TOKENS), min_size=3, max_size=3))
def test_micro_batches_of_any_weights_are_the_large_batch(of_three, tokens):
    step, call = of_three
    batches = [micro_batch(number, count) for number, count in enumerate(tokens)]
    if any(tokens):
        expected = gradient_by_hand(step.model, batches)
    else:  # Nothing to learn from: the gradient is 0.
        expected = [tf.zeros_like(weight) for weight in step.model.trainable_variables]
    moved, outputs = moves(step, call, batches)
    assert outputs["applied"]
    assert_same(moved, expected)


def test_a_mean_of_means_is_another_gradient(of_three):
    """What the weights are for: the same micro-batches by their means, as everybody does it."""
    step, _ = of_three
    batches = [micro_batch(number, count) for number, count in enumerate([1, 4, 2])]
    each = [gradient_by_hand(step.model, [one]) for one in batches]
    of_means = [np.mean(grads, axis=0) for grads in zip(*each, strict=True)]
    assert np.abs(of_means[0] - gradient_by_hand(step.model, batches)[0]).max() > 0.05


def test_the_loss_of_a_weighted_step_is_its_mean(of_three):
    step, call = of_three
    batch = micro_batch(0, 2)
    found = by_tokens(batch[1], step.model(batch[0]))
    outputs = [call(one) for one in (batch, batch, batch)]
    np.testing.assert_allclose(outputs[0]["loss"], found.total / found.weight, rtol=1e-6)
    np.testing.assert_allclose(call(micro_batch(1, 0))["loss"], 0.0)
    [call(one) for one in (batch, batch)]


@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
def test_weights_in_16_bits(policy):
    step = train_step(policy=policy, accumulate=2)
    batches = [micro_batch(0, 1), micro_batch(1, 4)]
    expected = gradient_by_hand(step.model, batches)
    moved, _ = moves(step, tf.function(step), batches)
    assert_same(moved, expected, rtol=2e-2, atol=2e-2)


def test_a_bad_micro_batch_of_any_weight_skips_its_window(of_three):
    step, call = of_three
    batches = [micro_batch(0, 2), micro_batch(1, 3, bad=np.inf), micro_batch(2, 0)]
    moved, outputs = moves(step, call, batches)
    assert outputs["attempted"]
    assert not outputs["applied"]
    assert_same(moved, [np.zeros_like(one) for one in moved], rtol=0, atol=0)
    _, outputs = moves(step, call, [micro_batch(number, 2) for number in range(3)])
    assert outputs["applied"]


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_a_weight_that_cannot_be_skips(weight):
    def loss(y, prediction):
        return loops.WeightedLoss(squared_error(y[:, :2], prediction), weight)

    step = train_step(loss, accumulate=2, last_window="apply")
    step.end_window()
    moved, outputs = moves(step, step, [micro_batch(0, 2)])
    assert outputs["attempted"]
    assert not outputs["applied"]
    assert all((one == 0.0).all() for one in moved)


def test_without_accumulation_a_weighted_loss_is_its_mean():
    step = train_step()
    batch = micro_batch(0, 3)
    expected = gradient_by_hand(step.model, [batch])
    assert_same(moves(step, step, [batch])[0], expected)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_that_differ_between_replicas(accumulate):
    strategy = mirrored(2)
    with strategy.scope():
        step = train_step(accumulate=accumulate)
    batches = [micro_batch(number, count) for number, count in enumerate([4, 1, 0, 3][: 2 * accumulate])]
    expected = gradient_by_hand(step.model, batches)
    before = [weight.numpy() for weight in step.model.trainable_variables]
    data = tf.data.Dataset.from_tensor_slices(large(batches)).batch(2 * TOKENS)
    losses = []
    loop = loops.Loop(step, data, strategy=strategy, actions=[lambda visit: losses.extend(visit.outputs["loss"])])
    loop.run(accumulate)
    moved = [old - new.numpy() for old, new in zip(before, step.model.trainable_variables, strict=True)]
    assert_same(moved, expected)
    for loss, pair in zip(losses, [batches[:2], batches[2:]], strict=False):
        x, y = large(pair)
        keras.utils.set_random_seed(0)
        found = by_tokens(y, model()(x))
        np.testing.assert_allclose(loss, found.total / found.weight, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_last_window_is_the_mean_of_what_it_has(length):
    step = train_step(lambda y, prediction: squared_error(y[:, :2], prediction), accumulate=4, last_window="apply")
    batches = [micro_batch(number, TOKENS) for number in range(length)]
    call = tf.function(step)
    ends = [number == length - 1 for number in range(length)]
    before = [weight.numpy() for weight in step.model.trainable_variables]
    for one, end in zip(batches, ends, strict=True):
        if end:
            step.end_window()
        assert bool(call(one)["attempted"]) == end
    moved = [old - new.numpy() for old, new in zip(before, step.model.trainable_variables, strict=True)]
    x, y = large(batches)
    with tf.GradientTape() as tape:
        for weight, old in zip(step.model.trainable_variables, before, strict=True):
            weight.assign(old)
        loss = squared_error(y[:, :2], step.model(x))
    assert_same(moved, tape.gradient(loss, step.model.trainable_variables))


def runs(step, batches, goals, **arguments):
    """At which of the steps something was decided, in a loop that runs to each goal in turn."""
    attempted = []
    data = tf.data.Dataset.from_tensor_slices(large(batches)).batch(TOKENS, drop_remainder=True).repeat()
    note = [lambda visit: attempted.extend(visit.outputs["attempted"])]
    loop = loops.Loop(step, data, actions=note, **arguments)
    for goal in goals:
        loop.run(goal)
    return [number + 1 for number, one in enumerate(attempted) if one]


@pytest.mark.parametrize("steps_per_call", [None, 1, 50])
def test_a_run_ends_its_last_window(steps_per_call):
    step = train_step(accumulate=4, last_window="apply")
    batches = [micro_batch(number, TOKENS) for number in range(3)]
    assert runs(step, batches, [6, 7, 15], steps_per_call=steps_per_call) == [4, 6, 7, 11, 15]
    kept = train_step(accumulate=4)
    assert runs(kept, batches, [6, 7, 15], steps_per_call=steps_per_call) == [4, 8, 12]


def test_a_run_of_one_step_ends_the_window_that_it_begins():
    assert runs(train_step(accumulate=4, last_window="apply"), [micro_batch(0, 2)], [1]) == [1]


@pytest.mark.parametrize("steps_per_call", [1, 50])
def test_windows_of_a_schedule_follow_applied_steps(steps_per_call):
    step = train_step(accumulate=SIZES)
    batches = [micro_batch(number, TOKENS) for number in range(3)]
    assert runs(step, batches, [12], steps_per_call=steps_per_call) == [1, 2, 4, 6, 9, 12]
    assert (step.accumulate, step.windows) == (3, SIZES)


def test_a_scheduled_window_is_the_large_batch_and_waits_at_a_skip():
    step = train_step(accumulate=SIZES)
    call = tf.function(step)
    [call(micro_batch(number, 4)) for number in range(2)]
    assert step.loss_scaler.counters.applied == 2
    _, outputs = moves(step, call, [micro_batch(0, 4), micro_batch(1, 4, bad=np.nan)])
    assert outputs["attempted"]
    assert not outputs["applied"]
    for begin in (2, 4):
        batches = [micro_batch(begin, 4), micro_batch(begin + 1, 2)]
        expected = gradient_by_hand(step.model, batches)
        assert_same(moves(step, call, batches)[0], expected)
    batches = [micro_batch(number, 4 - number) for number in range(3)]
    expected = gradient_by_hand(step.model, batches)
    assert_same(moves(step, call, batches)[0], expected)


@pytest.mark.parametrize("accumulate", [0, {}, {1: 2}, {0: 0}, {0: 1, 2.5: 4}, {0: True}, {-1: 2, 0: 1}, "4"])
def test_windows_that_cannot_be_are_refused(accumulate):
    with pytest.raises(scaler.InvalidArgument, match="accumulate"):
        train_step(accumulate=accumulate)


@pytest.mark.parametrize(
    "arguments", [{"last_window": "drop", "accumulate": 2}, {"last_window": "apply"}, {"last_window": None}]
)
def test_last_windows_that_cannot_be_are_refused(arguments):
    with pytest.raises(scaler.InvalidArgument, match="last_window"):
        train_step(**arguments)


def test_only_a_built_step_that_applies_short_windows_ends_them():
    with pytest.raises(scaler.InvalidArgument, match="keeps windows that are not full"):
        train_step(accumulate=2).end_window()
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(scaler.InvalidArgument, match="is not built"):
        loops.TrainStep(unbuilt, by_tokens, "sgd", accumulate=2, last_window="apply").end_window()


def test_a_graph_may_end_a_window_and_the_next_one_is_whole():
    step = train_step(accumulate=3, last_window="apply")

    @tf.function
    def take(number, batch):
        if tf.equal(number % 4, 3):
            step.end_window()
        return step(batch)["attempted"]

    attempted = [bool(take(tf.constant(number), micro_batch(0, 2))) for number in range(8)]
    assert attempted == [False, False, True, True, False, False, True, True]


@pytest.mark.parametrize("weight", [None, "3", (1.0, 2.0), np.ones(TOKENS, np.float32)])
def test_a_weight_that_is_no_scalar_is_refused(weight):
    with pytest.raises(loops.BadOutputs, match="weight="):
        train_step(lambda y, prediction: loops.WeightedLoss(1.0 * tf.reduce_sum(prediction), weight))(micro_batch(0, 2))


def test_a_pair_of_scalars_is_no_weighted_loss():
    """It might as well be a loss and an accuracy."""
    with pytest.raises(loops.BadOutputs, match=r"expected a scalar or an hs\.WeightedLoss"):
        train_step(lambda y, prediction: (tf.reduce_sum(prediction), 3.0))(micro_batch(0, 2))


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


def test_progress_says_once_what_batch_norm_sees(capsys):
    keras.utils.set_random_seed(0)
    own = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    step = loops.TrainStep(own, by_tokens, "sgd", accumulate=2)
    data = tf.data.Dataset.from_tensors(micro_batch(0, 3)).repeat()
    loop = loops.Loop(step, data, steps_per_call=2, actions=[loops.Progress()])
    loop.run(4)
    loop.run(8)
    assert capsys.readouterr().err.count("BatchNorm's statistics are those of each micro-batch") == 1


def test_the_short_names_are_there():
    assert hs.WeightedLoss is loops.WeightedLoss


def resumed(folder, goal, changed=(), **arguments):
    """The steps at which something was decided, of a run in a folder that goes on where the last one ended."""
    checkpoint = loops.Checkpoint(folder, every=1, resume=True, changed=list(changed))
    attempted = []
    data = tf.data.Dataset.from_tensors(micro_batch(0, 3)).repeat()

    def note(visit):
        attempted.extend(zip(range(visit.first, 99), visit.outputs["attempted"], strict=False))

    loop = loops.Loop(train_step(**arguments), data, steps_per_call=1, actions=[note, checkpoint])
    loop.run(goal)
    return [step for step, one in attempted if one], loop.resumed


def test_a_schedule_goes_on_in_its_window_and_changes_by_name(tmp_path):
    assert resumed(tmp_path, 3, accumulate=SIZES) == ([1, 2], None)
    assert resumed(tmp_path, 8, accumulate=SIZES)[0] == [4, 6]
    with pytest.raises(loops.CheckpointError, match="accumulate was"):
        resumed(tmp_path, 12, accumulate=4)
    attempted, told = resumed(tmp_path, 12, ["accumulate"], accumulate=4)
    assert attempted == [12]
    assert "window that is open after micro-batch 2 is dropped" in told.changes[0]


@pytest.mark.dear("a run on two replicas and one on another number")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_an_open_window_of_weights_goes_on_with_other_replicas(tmp_path, before, after):
    batches = [micro_batch(number, count) for number, count in enumerate([4, 1, 0, 3])]
    data = tf.data.Dataset.from_tensor_slices(large(batches)).batch(2 * TOKENS)
    for replicas, goal, changed in ((before, 1, []), (after, 2, ["replicas"])):
        strategy = mirrored(replicas) if replicas > 1 else None
        with strategy.scope() if strategy else contextlib.nullcontext():
            step = train_step(accumulate=2)
        old = [weight.numpy() for weight in step.model.trainable_variables]
        expected = gradient_by_hand(step.model, batches)
        checkpoint = loops.Checkpoint(tmp_path, every=1, resume=True, changed=changed)
        loops.Loop(step, data, strategy=strategy, actions=[checkpoint]).run(goal)
    assert_same([one - new.numpy() for one, new in zip(old, step.model.trainable_variables, strict=True)], expected)


@pytest.mark.parametrize("known", [True, False])
def test_a_dataset_that_ends_before_the_goal_ends_the_window_if_it_knows(known):
    batches = [micro_batch(number, TOKENS) for number in range(6)]
    data = tf.data.Dataset.from_tensor_slices(large(batches)).batch(TOKENS)
    data = data if known else data.filter(lambda x, y: True)
    loop = loops.Loop(train_step(accumulate=4, last_window="apply"), data)
    with pytest.raises(loops.OutOfData):
        loop.run(100)
    assert loop.counters.attempted == (2 if known else 1)


def test_a_step_that_calls_a_train_step_ends_its_window():
    inner = train_step(accumulate=4, last_window="apply")

    def step(batch):
        return inner(batch)

    assert runs(step, [micro_batch(0, 3)], [6]) == [4, 6]


def test_a_guard_judges_the_loss_of_the_whole_window():
    """A light micro-batch with a large loss is no spike, and a heavy one is."""

    def scaled(y, prediction):
        return loops.WeightedLoss(y[0, 0] * y[0, 1] + 0.0 * tf.reduce_sum(prediction), y[0, 1])

    def batch_of(loss, weight):
        return np.ones((1, 3), np.float32), np.array([[loss, weight]], np.float32)

    guard = scaler.SpikeGuard(scaler.Static(1.0), window=5, norm=False)
    step = loops.TrainStep(
        model(), scaled, keras.optimizers.SGD(0.0), loss_scaler=guard, accumulate=2, last_window="apply"
    )
    call = tf.function(step)

    def applied(*pairs):
        for pair in pairs[:-1]:
            call(batch_of(*pair))
        step.end_window()
        return bool(call(batch_of(*pairs[-1]))["applied"])

    for _ in range(5):
        assert applied((1.0, 1000.0), (1.0, 1.0))
    assert float(step.loss_scaler.state.loss_usual) == 1.0
    assert applied((1.0, 1000.0), (8.0, 1.0))
    assert not applied((8.0, 1000.0), (1.0, 1.0))
    assert applied((1.0, 1.0))  # A short window has its own mean, and not a half of it.
    assert float(step.loss_scaler.state.losses[-1]) == 1.0
    assert not applied((8.0, 1.0))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_batch_of_weight_0_counts_for_nothing_not_even_its_penalties(accumulate, replicas):
    strategy = mirrored(replicas) if replicas > 1 else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        penalty = keras.regularizers.L2(0.1)
        own = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_regularizer=penalty)])
        step = loops.TrainStep(own, by_tokens, keras.optimizers.SGD(1.0), accumulate=accumulate)
    before, losses = own.get_weights(), []
    data = tf.data.Dataset.from_tensors(micro_batch(0, 0)).repeat()
    note = [lambda visit: losses.extend(visit.outputs["loss"])]
    loops.Loop(step, data, strategy=strategy, actions=note).run(accumulate)
    assert losses == [0.0] * accumulate
    assert_same(before, own.get_weights(), rtol=0, atol=0)


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_a_weight_that_cannot_be_skips_without_a_window_too(weight):
    step = train_step(lambda y, prediction: loops.WeightedLoss(squared_error(y[:, :2], prediction), weight))
    assert not step(micro_batch(0, 2))["applied"]


def test_a_replay_ends_windows_where_the_run_did(tmp_path):
    def loop(every):
        log = loops.JsonLines(tmp_path / "steps.jsonl")
        saves = loops.Checkpoint(tmp_path / "checkpoints", every=every, keep=100)
        data = tf.data.Dataset.from_tensor_slices(large([micro_batch(n, 3) for n in range(5)])).batch(TOKENS).repeat()
        return loops.Loop(train_step(accumulate=3, last_window="apply"), data, actions=[log, saves])

    run = loop(4)
    for goal in (4, 5, 12):
        run.run(goal)
    for step in (5, 7, 12):
        found = rewind(loop(4), step)
        assert found.reproduced, found.differs
        assert bool(found.outputs()["attempted"]) == bool(found.logged["attempted"])


def test_keras_takes_no_weighted_loss_and_a_function_returns_one():
    """As a tuple Keras took the mean of the total and the weight."""
    own = model()
    own.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1)), loss=by_tokens)
    with pytest.raises((TypeError, ValueError, AttributeError)):
        own.train_on_batch(*micro_batch(0, 2))
    found = tf.function(by_tokens)(micro_batch(0, 3)[1], tf.zeros([TOKENS, 2]))
    assert isinstance(found, loops.WeightedLoss)
    assert float(found.weight) == 3.0
    step = train_step(tf.function(by_tokens), accumulate=2)
    batches = [micro_batch(number, count) for number, count in enumerate([1, 4])]
    expected = gradient_by_hand(step.model, batches)
    assert_same(moves(step, step, batches)[0], expected)
