"""Guards what a resumed run says of a program that was changed: what is refused, what warns, and what is no change."""

import json
import pathlib
import re
import types

import keras
import pytest
import tensorflow as tf
from checkpoint_cases import one_by_one, training
from models import squared_error

import loops
import scaler
from loops.loop.state.compared import check_identity, differences, other_rates
from loops.loop.state.described import exact, identity
from loops.loop.state.described import settings as state_settings


def state_differences(then, now):
    return list(differences(then, now).values())


def layers(*names):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.layers.Input((4,)), *(keras.layers.Dense(4, use_bias=False, name=name) for name in names)]
    )


def of_own_step(place, model, trained=None, rate=0.1, momentum=0.9, size=4, seed=1):
    """A step that trains the kernels of some of the layers, whatever their flags; by default all that are trained."""
    optimizer = keras.optimizers.SGD(rate, momentum=momentum)
    weights = model.trainable_variables if trained is None else [model.layers[number].kernel for number in trained]

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}

    data = tf.data.Dataset.from_tensor_slices((tf.ones([8, 4]), tf.ones([8, 4]))).shuffle(8, seed=seed)
    return one_by_one(step, data.repeat().batch(size), loops.Checkpoint(place, every=1, resume=True))


@pytest.mark.slow
def test_layers_that_changed_places_are_named(tmp_path):
    of_own_step(tmp_path, layers("first", "second")).run(1)
    wrong = r"holds the variables of its step in another order.*: '\S*second/kernel' that of '\S*first/kernel'"
    with pytest.warns(loops.ResumeWarning, match=wrong):
        of_own_step(tmp_path, layers("second", "first")).run(2)


def test_other_settings_of_a_step_of_ones_own_are_named(tmp_path):
    of_own_step(tmp_path, layers("first")).run(1)
    with pytest.warns(loops.ResumeWarning) as caught:
        of_own_step(tmp_path, layers("first"), rate=0.2, momentum=0.5, size=2, seed=2).run(2)
    (said,) = (str(one.message) for one in caught)
    for named in (r"SGD\.learning_rate was 0\.1\d* and is 0\.2", r"SGD\.momentum was 0\.9 and is 0\.5"):
        assert re.search(named, said)
    for named in ("batch.batch_size was 4 and is 2", "shuffle.seed was 1 and is 2"):
        assert named in said
    for named in (". A constant learning rate goes on as it", "a schedule, and everything else, is this program's"):
        assert named in said


@pytest.mark.slow
def test_a_schedule_is_not_said_to_continue(tmp_path):
    def rate(steps):
        return keras.optimizers.schedules.CosineDecay(0.1, steps)

    of_own_step(tmp_path, layers("first"), rate=rate(4)).run(2)
    with pytest.warns(loops.ResumeWarning) as said:
        of_own_step(tmp_path, layers("first"), rate=rate(8)).run(3)
    settings, rates = (str(one.message) for one in said)
    assert "SGD.learning_rate.config.decay_steps was 4 and is 8. A constant learning rate goes on as it" in settings
    assert "a schedule, and everything else, is this program's" in settings
    assert rates.endswith("at update 2 of SGD the learning rate was to be 0.05, and is 0.0853553.")


def test_what_a_changed_schedule_gives_is_told():
    def of(steps):
        optimizer = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, steps))
        optimizer.iterations.assign(2)
        return lambda x: optimizer

    saved = state_settings(of(4), None)
    told = "at update 2 of SGD the learning rate was to be 0.05, and is 0.0853553."
    assert other_rates(of(8), saved) == [told]
    assert other_rates(of(4), saved) == []


@pytest.mark.parametrize("then", [None, {}, {"class_name": "deserialize"}, {"class_name": "CosineDecay", "config": 3}])
def test_a_schedule_that_is_not_known_is_not_told(then):
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 8))
    assert other_rates(lambda x: optimizer, {"SGD": {"learning_rate": then}}) == []
    assert other_rates(lambda x: optimizer, {}) == []


def seeded(seeds):
    tf.random.set_seed(seeds[0])
    return tf.data.Dataset.range(3).shuffle(3, seed=seeds[1])


def sampled(weights):
    zeros, ones = (tf.data.Dataset.from_tensors(value).repeat() for value in (0, 1))
    return tf.data.Dataset.sample_from_datasets([zeros, ones], weights, seed=0)


RANGE = tf.data.Dataset.range(100)
DATA = {
    "take": (RANGE.take, 10, 20, "take.count was 10 and is 20"),
    "skip": (RANGE.skip, 10, 20, "skip.count was 10 and is 20"),
    "shard": (lambda index: RANGE.shard(2, index), 0, 1, "shard.index was 0 and is 1"),
    "shuffle": (
        lambda again: RANGE.shuffle(4, seed=0, reshuffle_each_iteration=again),
        *(True, False, "shuffle.reshuffle_each_iteration was True and is False"),
    ),
    "range": (lambda step: tf.data.Dataset.range(0, 8, step), 1, 2, "range.step was 1 and is 2"),
    "interleave": (
        lambda length: RANGE.interleave(lambda n: tf.data.Dataset.range(8), 2, block_length=length),
        *(1, 3, "interleave.block_length was 1 and is 3"),
    ),
    "rebatch": (RANGE.batch(4).rebatch, 2, 1, "rebatch.batch_sizes was 2 and is 1"),
    "rebatch in turn": (RANGE.batch(4).rebatch, [2, 1], [1, 2], "rebatch.batch_sizes was [2, 1] and is [1, 2]"),
    "window": (
        lambda size: RANGE.window(size, shift=2).flat_map(lambda part: part),
        *(2, 3, "window.size was 2 and is 3"),
    ),
    "weights": (
        *(sampled, [0.9, 0.1], [0.25, 0.75]),
        "sample_from_datasets.weights was [0.9, 0.1] and is [0.25, 0.75]",
    ),
    "global seed": (seeded, (0, 3), (9, 3), "the global seed (tf.random.set_seed) of shuffle was 0 and is 9"),
    "no global seed": (seeded, (None, 3), (9, 3), "the global seed (tf.random.set_seed) of shuffle was None and is 9"),
    "own seed": (seeded, (0, 3), (0, 4), "shuffle.seed was 3 and is 4"),
    "no weights": (*(sampled, None, [0.25, 0.75]), "sample_from_datasets.weights was [0.5, 0.5] and is [0.25, 0.75]"),
}


class Wrapped:
    """A strategy of one's own, without a text of its own."""

    def __init__(self, scale):
        self.inner = scaler.Static(scale)

    def init(self):
        return self.inner.init()

    def update(self, state, event):
        return self.inner.update(state, event)


class Warm(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of one's own, without `get_config`."""

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, step):
        return self.rate * tf.minimum(1.0, tf.cast(step, tf.float32) / 10)


def identity_of(strategy=None, optimizer=None, run=None):
    """As a checkpoint holds it."""
    loss_scaler = scaler.LossScaler(strategy or scaler.Static(8.0))
    step = types.SimpleNamespace(optimizer=optimizer or keras.optimizers.SGD(0.1), loss_scaler=loss_scaler)
    return json.loads(json.dumps(identity(step, strategy=None, element_spec=None, run=exact(run or {}))))


OF_ONES_OWN = {
    "strategy": (
        lambda value: {"strategy": Wrapped(value)},
        r"strategy\.inner was 'Static\(.*8|inner\.loss_scale was 8",
    ),
    "schedule": (
        lambda value: {"optimizer": keras.optimizers.SGD(Warm(value), momentum=0.9)},
        r"optimizer\.learning_rate\.rate was 8.0 and is 16.0",
    ),
    "path": (lambda value: {"run": {"data": pathlib.Path(f"{value}")}}, r"run\.data was '8.0' and is '16.0'"),
}


@pytest.mark.parametrize("name", OF_ONES_OWN)
def test_objects_of_ones_own_are_told_apart_by_what_they_hold(name):
    """In another process they lie at other addresses, so that nothing may depend on these."""
    changed, named = OF_ONES_OWN[name]

    assert check_identity("run/ckpt-2", identity_of(**changed(8.0)), identity_of(**changed(8.0))) == {}
    with pytest.raises(loops.CheckpointError, match=named):
        check_identity("run/ckpt-2", identity_of(**changed(8.0)), identity_of(**changed(16.0)))


def test_nan_is_no_other_number():
    """A schedule that ends in NaN is one's own to find, and no other run."""

    def of():
        schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 50, end_learning_rate=float("nan"))
        optimizer = keras.optimizers.SGD(schedule)
        return identity_of(optimizer=optimizer), state_settings(lambda x: optimizer, RANGE)

    saved, here = of(), of()
    assert check_identity("run/ckpt-2", saved[0], here[0]) == {}
    assert state_differences(saved[1], here[1]) == []


def half_frozen(frozen):
    model = layers("a", "b")
    model.layers[frozen].trainable = False
    return model


@pytest.mark.usefixtures("eagerly")
@pytest.mark.slow_with("step")
@pytest.mark.parametrize("kind", ["TrainStep", "step"])
def test_another_layer_that_is_frozen_is_refused(tmp_path, kind):
    def loop(frozen):
        if kind == "step":
            return of_own_step(tmp_path, half_frozen(frozen))
        return training(tmp_path, model=lambda: half_frozen(frozen), resume=True)

    same = loop(0)
    for _ in range(2):
        assert same.run(1).data == 1
        same.restart(same.position.dataset, [loops.Checkpoint(tmp_path, every=1, resume=True)])
    first, second = r"'\S*a/kernel' was frozen and is trainable", r"'\S*b/kernel' was trainable and is frozen"
    with pytest.raises(loops.CheckpointError, match=f"while other weights were trained: {first}; .*{second}"):
        loop(1).run(2)


@pytest.mark.slow_with("renumbered")
@pytest.mark.parametrize("case", ["renumbered", "numbered as another"])
def test_slots_of_other_weights_are_named(tmp_path, case):
    """Keras's own numbers, which another process begins elsewhere, make no slot that of another weight."""
    usual, moved = ("dense", "dense_1", "dense_2"), ("dense_1", "dense_2", "dense_3")
    of_own_step(tmp_path, layers(*usual), (1, 2)).run(1)
    if case == "renumbered":
        of_own_step(tmp_path, layers(*moved), (1, 2)).run(2)
        return
    wrong = r"holds slots of other weights.*'\S*dense_1_kernel_\w+' that of '\S*dense_1_kernel_\w+'"
    with pytest.warns(loops.ResumeWarning, match=wrong):
        of_own_step(tmp_path, layers(*moved), (0, 2)).run(2)


def test_strategies_of_each_loss_and_of_groups_are_settings():
    def both(interval):
        strategy = scaler.Dynamic(growth_interval=interval)
        weight = tf.Variable(1.0)
        losses = scaler.PerLoss({"task": strategy})
        groups = scaler.layerwise.Layerwise({"all": [weight]}, strategy=strategy)
        return state_settings(lambda x: (losses, groups), tf.data.Dataset.range(3))

    said = state_differences(both(10), both(20))
    assert [one.split(" ")[0] for one in said] == ["Layerwise.strategy", "PerLoss.task"]
    assert all("growth_interval=10" in one and "growth_interval=20" in one for one in said)


@pytest.mark.parametrize(("then", "now"), [(["one"], ["two"]), (["one"], ["one", "two"])])
def test_the_places_of_rescales_are_a_setting(then, now):
    def of(after):
        model, layerwise = scaler.layerwise.insert_rescales(layers("one", "two"), after=after)
        return state_settings(lambda x: (model, layerwise), tf.data.Dataset.range(3))

    (said,) = state_differences(of(then), of(now))
    assert said.startswith("Layerwise.groups was 'variables ")
    assert state_differences(of(then), of(then)) == []


def step_with(**setting):
    return loops.TrainStep(layers("a"), squared_error, keras.optimizers.SGD(), **setting)


STEPS = {
    "retry": (lambda value: step_with(retry=value), True, False, "TrainStep.retry was True and is False"),
    "XLA": (lambda value: step_with(jit_compile=value), False, True, "TrainStep.jit_compile was False and is True"),
    "seed of stochastic rounding": (
        lambda seed: using(scaler.weights.StochasticRounding([tf.Variable([1.0], dtype=tf.float16)], seed=seed)),
        *(3, 4, "StochasticRounding.seed was 3 and is 4"),
    ),
    "sums of duplicates": (
        lambda value: using(scaler.LossScaler(sum_duplicates=value)),
        *(True, False, "LossScaler.sum_duplicates was True and is False"),
    ),
}


def using(one):
    return lambda x: one


@pytest.mark.parametrize("name", [*DATA, *STEPS])
def test_other_numbers_of_a_dataset_are_named(name):
    """And other settings of what a step uses."""
    make, then, now, said = (DATA | STEPS)[name]

    def of(value):
        return state_settings(make(value), RANGE) if name in STEPS else state_settings(using(None), make(value))

    assert state_differences(of(then), of(now)) == [said]
    assert state_differences(of(then), of(then)) == []


def test_an_optimizer_around_another_is_the_same_in_a_process_that_numbers_it_anew():
    def of():
        optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        return state_settings(lambda x: optimizer, tf.data.Dataset.range(3))

    assert state_differences(of(), of()) == []
