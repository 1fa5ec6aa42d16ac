"""Guards what a resumed run says of a program that was changed: what is refused, what warns, and what is no change."""

import pathlib
import shutil
import warnings

import keras
import pytest
import tensorflow as tf
from checkpoint_cases import one_by_one, training
from loop_cases import line

import loops
import scaler
from loops.loop.state.compared import differences, other_rates
from loops.loop.state.described import settings as state_settings


def state_differences(then, now):
    return list(differences(then, now).values())


def layers(*names):
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(4, name=name) for name in names]
    return keras.Sequential([keras.layers.Input((4,)), *dense, keras.layers.Dense(1, name="last")])


def of_own_step(place, model, rate=0.1, momentum=0.9, size=4, seed=1):
    optimizer = keras.optimizers.SGD(rate, momentum=momentum)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {"loss": loss}

    data = tf.data.Dataset.from_tensor_slices((tf.ones([8, 4]), tf.ones([8, 1]))).shuffle(8, seed=seed)
    data = data.repeat().batch(size)
    return one_by_one(step, data, loops.Checkpoint(place, every=2, resume=True))


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """Where a step of one's own was taken twice."""
    place = tmp_path_factory.mktemp("two steps")
    of_own_step(place, layers("first")).run(2)
    return place


@pytest.mark.exhaustive_with("names1")
@pytest.mark.slow_with("names0", "names1")
@pytest.mark.parametrize("names", [["first", "second"], ["block_1", "block_2"]])
def test_layers_that_changed_places_are_named(tmp_path, names):
    """Another model in the process gives the second Sequential another number."""
    of_own_step(tmp_path, layers(*names)).run(2)
    wrong = (
        rf"holds the variables of its step in another order.*: '\S*{names[1]}/kernel' that of '\S*{names[0]}/kernel'"
    )
    with pytest.warns(loops.ResumeWarning, match=wrong):
        of_own_step(tmp_path, layers(*reversed(names))).run(4)


@pytest.mark.exhaustive
def test_layers_that_keras_numbers_anew_are_the_same(tmp_path):
    """The names of three layers move by one: each but the last is that of another one in the checkpoint."""
    of_own_step(tmp_path, layers("dense", "dense_1", "dense_2")).run(2)
    of_own_step(tmp_path, layers("dense_1", "dense_2", "dense_3")).run(4)


@pytest.mark.slow_with(
    "{'momentum': 0.5}-settings: SGD\\\\.momentum was 0\\\\.9 and is 0\\\\.5\\\\. A constant learning rate",
    "{'seed': 2}-settings: shuffle\\\\.seed was 1 and is 2\\\\. A constant learning rate",
)
@pytest.mark.parametrize(
    ("other", "named"),
    [
        (
            {"rate": 0.2},
            r"settings: SGD\.learning_rate was 0\.1\d* and is 0\.2\d*\. A constant learning rate goes on as",
        ),
        ({"momentum": 0.5}, r"settings: SGD\.momentum was 0\.9 and is 0\.5\. A constant learning rate"),
        ({"size": 2}, r"settings: batch\.batch_size was 4 and is 2\. A constant learning rate"),
        ({"seed": 2}, r"settings: shuffle\.seed was 1 and is 2\. A constant learning rate"),
    ],
    ids=str,
)
def test_other_settings_of_a_step_of_ones_own_are_named(two_steps, tmp_path, other, named):
    shutil.copytree(two_steps, tmp_path / "run")
    with pytest.warns(loops.ResumeWarning, match=named) as said:
        of_own_step(tmp_path / "run", layers("first"), **other).run(4)
    assert len(said) == 1


@pytest.mark.slow
def test_a_schedule_is_not_said_to_continue(tmp_path):
    def rate(steps):
        return keras.optimizers.schedules.CosineDecay(0.1, steps)

    of_own_step(tmp_path, layers("first"), rate=rate(4)).run(2)
    with pytest.warns(loops.ResumeWarning) as said:
        of_own_step(tmp_path, layers("first"), rate=rate(8)).run(4)
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


@pytest.mark.parametrize(
    ("then", "now", "named"),
    [
        ((0, 3), (9, 3), "the global seed (tf.random.set_seed) of shuffle was 0 and is 9"),
        ((None, 3), (9, 3), "the global seed (tf.random.set_seed) of shuffle was None and is 9"),
        ((0, 3), (0, 4), "shuffle.seed was 3 and is 4"),
    ],
)
def test_the_global_seed_is_not_that_of_the_shuffle(then, now, named):
    def of(everywhere, own):
        tf.random.set_seed(everywhere)
        return state_settings(lambda x: None, tf.data.Dataset.range(3).shuffle(3, seed=own))

    try:
        assert state_differences(of(*then), of(*now)) == [named]
    finally:
        tf.random.set_seed(None)


def sampled(weights):
    zeros, ones = (tf.data.Dataset.from_tensors(value).repeat() for value in (tf.zeros([4]), tf.ones([4])))
    return tf.data.Dataset.sample_from_datasets([zeros, ones], weights, seed=0).batch(2)


@pytest.mark.exhaustive_with("window")
@pytest.mark.parametrize(
    ("then", "now", "named"),
    [
        (lambda data: data.rebatch(2), lambda data: data.rebatch(1), r"rebatch\.batch_sizes was 2 and is 1\."),
        (
            lambda data: data.rebatch([2, 1]),
            lambda data: data.rebatch([1, 2]),
            r"rebatch\.batch_sizes was \[2, 1\] and is \[1, 2\]\.",
        ),
        (
            lambda data: data.window(2).flat_map(lambda part: part),
            lambda data: data.window(3, shift=2).flat_map(lambda part: part),
            r"window\.size was 2 and is 3\.",
        ),
        (
            lambda data: sampled([0.9, 0.1]),
            lambda data: sampled([0.25, 0.75]),
            r"sample_from_datasets\.weights was \[0\.9, 0\.1\] and is \[0\.25, 0\.75\]\.",
        ),
        (
            lambda data: sampled(None),
            lambda data: sampled([0.25, 0.75]),
            r"sample_from_datasets\.weights was \[0\.5, 0\.5\] and is \[0\.25, 0\.75\]\.",
        ),
    ],
    ids=["rebatch", "rebatch in turn", "window", "weights", "no weights"],
)
def test_other_settings_of_the_operations_of_a_dataset_are_named(tmp_path, then, now, named):
    total = tf.Variable(0.0)
    data = tf.data.Dataset.from_tensors(tf.ones([4])).repeat().batch(4)

    def loop(change):
        return one_by_one(
            lambda x: {"loss": total.assign_add(tf.reduce_sum(x))},
            change(data),
            loops.Checkpoint(tmp_path, every=2, resume=True),
        )

    loop(then).run(2)
    loop(then).run(4)
    with pytest.warns(loops.ResumeWarning, match=named):
        loop(now).run(6)


@pytest.mark.slow
def test_a_learning_rate_that_the_run_itself_moved_is_no_other_setting(tmp_path):
    loop = of_own_step(tmp_path, layers("first"))
    rate = next(variable for variable in loop.state({}).groups["step"] if "learning_rate" in variable.name)
    loop.actions.insert(0, lambda visit: rate.assign(0.05))
    loop.run(2)
    assert of_own_step(tmp_path, layers("first")).run(4).data == 4  # Without a warning, which would be an error.


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


OF_ONES_OWN = {
    "strategy": (
        lambda value: {"scaling": Wrapped(value)},
        r"strategy\.inner\.loss_scale was 8.0 and is 16.0|strategy\.inner was 'Static\(.*8",
    ),
    "schedule": (
        lambda value: {"optimizer": keras.optimizers.SGD(Warm(value), momentum=0.9)},
        r"optimizer\.learning_rate\.rate was 8.0 and is 16.0",
    ),
    "path": (lambda value: {"run": {"data": pathlib.Path(f"{value}")}}, r"run\.data was '8.0' and is '16.0'"),
}


@pytest.mark.slow_with("strategy", "path", "schedule")
@pytest.mark.parametrize("name", OF_ONES_OWN)
def test_objects_of_ones_own_are_told_apart_by_what_they_hold(tmp_path, name):
    """In another process they lie at other addresses, so that nothing may depend on these."""
    changed, named = OF_ONES_OWN[name]
    training(tmp_path, model=line, **changed(8.0)).run(2)
    assert training(tmp_path, model=line, resume=True, **changed(8.0)).run(2).data == 2
    with pytest.raises(loops.CheckpointError, match=named):
        training(tmp_path, model=line, resume=True, **changed(16.0)).run(4)


def half_frozen(frozen, names=("a", "b")):
    model = layers(*names)
    model.layers[frozen].trainable = False
    return model


@pytest.mark.slow_with("step")
@pytest.mark.parametrize("kind", ["TrainStep", "step"])
def test_another_layer_that_is_frozen_is_refused(tmp_path, kind):
    def loop(frozen):
        if kind == "step":
            return of_own_step(tmp_path, half_frozen(frozen))
        return training(tmp_path, model=lambda: half_frozen(frozen), resume=True)

    loop(0).run(2)
    assert loop(0).run(2).data == 2
    first, second = r"'\S*a/kernel' was frozen and is trainable", r"'\S*b/kernel' was trainable and is frozen"
    with pytest.raises(loops.CheckpointError, match=f"while other weights were trained: {first}; .*{second}"):
        loop(1).run(4)


def of_some_weights(place, *trained, names=("dense", "dense_1", "dense_2")):
    """A step that trains the kernels of some of the layers, whatever their flags."""
    model, optimizer = layers(*names), keras.optimizers.SGD(0.1, momentum=0.9)
    variables = [model.layers[number].kernel for number in trained]

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}

    data = tf.data.Dataset.from_tensors((tf.ones([8, 4]), tf.ones([8, 1]))).repeat()
    return one_by_one(step, data, loops.Checkpoint(place, every=2, resume=True))


@pytest.mark.slow_with("another", "renumbered")
@pytest.mark.parametrize("case", ["another", "renumbered", "numbered as another"])
def test_slots_of_other_weights_are_named(tmp_path, case):
    """Keras's own numbers, which another process begins elsewhere, make no slot that of another weight."""
    of_some_weights(tmp_path, 1, 2).run(2)
    if case == "renumbered":
        of_some_weights(tmp_path, 1, 2, names=("dense_1", "dense_2", "dense_3")).run(4)
        return
    names = ("dense", "dense_1", "dense_2") if case == "another" else ("dense_1", "dense_2", "dense_3")
    wrong = rf"holds slots of other weights.*'\S*{names[0]}_kernel_\w+' that of '\S*dense_1_kernel_\w+'"
    with pytest.warns(loops.ResumeWarning, match=wrong):
        of_some_weights(tmp_path, 0, 2, names=names).run(4)


def of_data(place, change=lambda data: data, **options):
    data = change(tf.data.Dataset.range(100)).repeat()
    loss_scaler, weight = scaler.LossScaler(scaler.Static(8.0), **options), tf.Variable(1.0)

    def step(x):
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(weight * tf.cast(x, tf.float32))
        loss_scaler.apply(scaler.move_nothing, tape.gradient(scaled, [weight]), [weight])
        return {"loss": weight + 0.0}

    return one_by_one(step, data, loops.Checkpoint(place, every=2, resume=True))


@pytest.mark.exhaustive_with("skip", "shard")
@pytest.mark.slow_with("skip", "shard", "shuffle")
@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (lambda data: data.take(10), lambda data: data.take(20), r"take\.count was 10 and is 20"),
        (lambda data: data.skip(10), lambda data: data.skip(20), r"skip\.count was 10 and is 20"),
        (lambda data: data.shard(2, 0), lambda data: data.shard(2, 1), r"shard\.index was 0 and is 1"),
        (
            lambda data: data.shuffle(4, seed=0),
            lambda data: data.shuffle(4, seed=0, reshuffle_each_iteration=False),
            r"shuffle\.reshuffle_each_iteration was True and is False",
        ),
    ],
    ids=["take", "skip", "shard", "shuffle"],
)
def test_other_numbers_of_a_dataset_are_named(tmp_path, first, second, named):
    of_data(tmp_path, first).run(2)
    with pytest.warns(loops.ResumeWarning, match=named):
        of_data(tmp_path, second).run(4)


@pytest.mark.slow_with("interleave", "range")
@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (lambda: tf.data.Dataset.range(0, 8, 1), lambda: tf.data.Dataset.range(0, 8, 2), r"range\.step was 1 and is 2"),
        (
            lambda: tf.data.Dataset.range(4).interleave(lambda n: tf.data.Dataset.range(8), 2, block_length=1),
            lambda: tf.data.Dataset.range(4).interleave(lambda n: tf.data.Dataset.range(8), 2, block_length=3),
            r"interleave\.block_length was 1 and is 3",
        ),
    ],
    ids=["range", "interleave"],
)
def test_other_numbers_of_a_source_are_named(tmp_path, first, second, named):
    of_data(tmp_path, lambda data: first()).run(2)
    with pytest.warns(loops.ResumeWarning, match=named):
        of_data(tmp_path, lambda data: second()).run(4)


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


@pytest.mark.parametrize(("then", "now"), [(["one"], ["two"]), (["one"], ["one", "two"]), (["one", "two"], ["two"])])
def test_the_places_of_rescales_are_a_setting(then, now):
    def of(after):
        model, layerwise = scaler.layerwise.insert_rescales(layers("one", "two"), after=after)
        return state_settings(lambda x: (model, layerwise), tf.data.Dataset.range(3))

    (said,) = state_differences(of(then), of(now))
    assert said.startswith("Layerwise.groups was 'variables ")
    assert state_differences(of(then), of(then)) == []


@pytest.mark.exhaustive
def test_whether_xla_compiles_is_a_setting(tmp_path):
    def run(in_loop, in_step, goal):
        keras.utils.set_random_seed(0)
        step = loops.TrainStep(
            layers("first"), keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.1), jit_compile=in_step
        )
        data = tf.data.Dataset.from_tensors((tf.ones([4, 4]), tf.ones([4, 1]))).repeat()
        loop = loops.Loop(step, data, jit_compile=in_loop, actions=[loops.Checkpoint(tmp_path, every=1, resume=True)])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop.run(goal)
        return [str(one.message) for one in caught if issubclass(one.category, loops.ResumeWarning)]

    assert run(False, False, 1) == []
    assert run("auto", False, 2) == []
    (said,) = run(True, False, 3)
    assert "Loop.jit_compile was False and is True" in said
    (said,) = run(False, True, 4)
    assert "Loop.jit_compile was True and is False" in said
    assert "TrainStep.jit_compile was False and is True" in said


def test_a_retry_is_a_setting_of_a_step():
    def of(retry):
        model = layers("first")
        step = loops.TrainStep(model, keras.losses.MeanSquaredError(), keras.optimizers.SGD(), retry=retry)
        return state_settings(step, tf.data.Dataset.range(3))

    assert state_differences(of(True), of(False)) == ["TrainStep.retry was True and is False"]


def test_the_seed_of_stochastic_rounding_is_a_setting():
    def of(seed):
        rounded = scaler.weights.StochasticRounding([tf.Variable([1.0], dtype=tf.float16)], seed=seed)
        return state_settings(lambda x: rounded, tf.data.Dataset.range(3))

    assert state_differences(of(3), of(4)) == ["StochasticRounding.seed was 3 and is 4"]


def test_an_optimizer_around_another_is_the_same_in_a_process_that_numbers_it_anew():
    def of():
        optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        return state_settings(lambda x: optimizer, tf.data.Dataset.range(3))

    assert state_differences(of(), of()) == []


def test_other_settings_of_a_scaler_are_named(tmp_path):
    of_data(tmp_path).run(2)
    named = r"LossScaler\.sum_duplicates was True and is False"
    with pytest.warns(loops.ResumeWarning, match=named):
        of_data(tmp_path, sum_duplicates=False).run(4)


def of_losses(place, strategies):
    losses, weight = scaler.PerLoss(strategies), tf.Variable(1.0)

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            scaled = losses.scale({"task": weight * x, "penalty": weight * 2.0})
        grads = {name: tape.gradient(loss, [weight]) for name, loss in scaled.items()}
        losses.apply(scaler.move_nothing, grads, [weight])
        return {"loss": weight + 0.0, "task": losses["task"].loss_scale}

    data = tf.data.Dataset.from_tensors(1.0).repeat()
    return one_by_one(step, data, loops.Checkpoint(place, every=2, resume=True))


@pytest.mark.exhaustive
def test_losses_in_another_order_and_other_strategies_are_named(tmp_path):
    def dynamic(scale):
        return scaler.Dynamic(scale, growth_interval=100)

    of_losses(tmp_path, {"task": dynamic(4.0), "penalty": dynamic(8.0)}).run(2)
    other = {"task": scaler.Static(4.0), "penalty": dynamic(8.0)}
    named = r"step was task/\S+ .* and is \S+ .*settings were others, too: PerLoss.task was 'Dynamic.* and is 'Static\("
    with pytest.raises(loops.CheckpointError, match=named):
        of_losses(tmp_path, other).run(4)
    order = "'penalty/loss_scale' that of 'task/loss_scale'|list the losses of a PerLoss, in the order of that run"
    with pytest.warns(loops.ResumeWarning, match=order):
        of_losses(tmp_path, {"penalty": dynamic(8.0), "task": dynamic(4.0)}).run(4)
