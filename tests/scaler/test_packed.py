"""Slots and masters in buffers are seen by nobody: not in results, nor when read, assigned, saved or restored."""

import copy
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import scaler
from scaler import clusters, packed

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "excluded": lambda: without_decay(keras.optimizers.AdamW(0.01, weight_decay=0.5)),
    "Adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.01),
    "Ftrl": lambda: keras.optimizers.Ftrl(
        0.1, l1_regularization_strength=0.01, l2_shrinkage_regularization_strength=0.1
    ),
    "Lion": lambda: keras.optimizers.Lion(0.01, weight_decay=0.1),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
}
SHAPES = ((3, 4), (4, 2), (6,), (2, 3, 2), ())
BAD = 2
"""The step whose gradients have an infinity."""


def without_decay(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["weight_1", "weight_3"])
    return optimizer


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Five variables are enough."""
    monkeypatch.setattr(clusters, "_WORTH_COMPILING", 1)
    monkeypatch.setattr(packed, "_FEWEST", 2)


class Run:
    """A model of small variables, and what trains it."""

    def __init__(self, make=OPTIMIZERS["Adam"], pack=True, clip_norm=None, dtype="float32"):
        rng = np.random.default_rng(0)
        self.model = [
            keras.Variable(rng.normal(size=shape), dtype=dtype, name=f"weight_{number}")
            for number, shape in enumerate(SHAPES)
        ]
        self.optimizer, self.loss_scaler = make(), scaler.LossScaler(scaler.Static(8.0))
        self.masters = scaler.MasterWeights(self.model)
        self.pack, self.clip_norm, self.dtype = pack, clip_norm, dtype
        self.step, self.jitted = tf.function(self.apply), tf.function(self.apply, jit_compile=True)
        self.by_hand_in_a_function = tf.function(self.by_hand)
        self.count = 0

    def apply(self, grads):
        with pytest.MonkeyPatch.context() as patch:
            if not self.pack:
                patch.setattr(packed, "_FEWEST", 10**9)
            return self.loss_scaler.apply(self.optimizer, grads, self.masters, clip_norm=self.clip_norm).finite

    def by_hand(self, grads):
        self.optimizer.apply([tf.cast(grad, tf.float32) for grad in grads], self.masters.weights)
        self.masters.write()

    def grads(self, loss_scale=8.0):
        rng = np.random.default_rng(self.count)
        values = [rng.normal(size=shape) * loss_scale for shape in SHAPES]
        if self.count == BAD and loss_scale != 1.0:
            values[1][0, 0] = np.inf
        self.count += 1
        return [tf.constant(value, self.dtype) for value in values]

    def train(self, steps=1):
        for _ in range(steps):
            self.step(self.grads())
        return self

    @property
    def kept(self):
        """What may lie in buffers, as TensorFlow's variables."""
        masters = self.masters.weights if self.dtype != "float32" else []
        return [*(variable.value for variable in self.optimizer.variables), *masters]

    @property
    def in_buffers(self):
        return bool(vars(self.optimizer)[packed._ATTRIBUTE]._in_buffers)

    def state(self):
        variables = [*self.model, *self.masters.weights, *self.optimizer.variables]
        return [tf.convert_to_tensor(variable).numpy() for variable in variables]


def same_bits(ours, theirs):
    return all(one.tobytes() == other.tobytes() for one, other in zip(ours, theirs, strict=True))


def assert_close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        # Last bits of a master decide which way it is rounded.
        rtol = 2e-5 if one.dtype == np.float32 else 1e-2
        np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_moves_as_it_does_by_itself(name):
    ours, theirs, unseen = (Run(OPTIMIZERS[name], pack) for pack in (True, False, True))
    states = []
    for number in range(5):
        assert ours.train().in_buffers == (number != BAD)
        states.append(ours.state())
        assert not ours.in_buffers
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clusters, "worth_compiling", lambda *arguments: False)
            assert_close(states[-1], theirs.train().state())
    assert same_bits(states[BAD - 1], states[BAD])
    assert not same_bits(states[BAD], states[BAD + 1])
    unseen.train(5)
    assert unseen.in_buffers
    assert same_bits(unseen.state(), states[-1])


@pytest.mark.parametrize(("dtype", "clip_norm"), [("float32", 0.5), ("float16", None), ("bfloat16", 0.5)])
def test_masters_and_clipping(dtype, clip_norm):
    ours, theirs = (Run(pack=pack, dtype=dtype, clip_norm=clip_norm) for pack in (True, False))
    for _ in range(4):
        assert_close(ours.train().state(), theirs.train().state())
    for run in (ours, theirs):
        for variable in run.model:
            variable.assign(tf.ones_like(variable))
    assert ours.train().in_buffers
    assert_close(ours.state(), theirs.train().state())
    for variable, master in zip(ours.model, ours.masters.weights, strict=True):
        assert same_bits([tf.convert_to_tensor(variable).numpy()], [tf.cast(master, dtype).numpy()])


def numpy_of(run):
    return [variable.numpy() for variable in run.kept]


def checkpointed(run, path):
    file = tf.train.Checkpoint(optimizer=run.optimizer, masters=run.masters).write(str(path / "seen"))
    fresh = Run(pack=False, dtype=run.dtype).train(0)
    fresh.optimizer.build(fresh.masters.weights)
    tf.train.Checkpoint(optimizer=fresh.optimizer, masters=fresh.masters).read(file).assert_consumed()
    return numpy_of(fresh)


def own_variables(run):
    store = {}
    run.optimizer.save_own_variables(store)
    return list(store.values())


@tf.function
def values_of(variables):
    return [variable + 0.0 if variable.dtype.is_floating else variable.read_value() for variable in variables]


def saved_model(run, path):
    module = tf.Module()
    module.kept = run.kept
    tf.saved_model.save(module, str(path / "model"))
    return [variable.numpy() for variable in tf.saved_model.load(str(path / "model")).kept]


LOOKS = {
    "numpy": lambda run, raw, path: numpy_of(run),
    "value": lambda run, raw, path: [v.value().numpy() for v in run.kept],
    "deep copy": lambda run, raw, path: [v.numpy() for v in copy.deepcopy(run.kept)],
    "held since before": lambda run, raw, path: [v.numpy() for v in raw],
    "held, operator": lambda run, raw, path: [(v + tf.zeros([], v.dtype)).numpy() for v in raw],
    "in a function": lambda run, raw, path: [v.numpy() for v in tf.function(lambda: values_of(raw))()],
    "as arguments": lambda run, raw, path: [v.numpy() for v in values_of(raw)],
    "checkpoint": lambda run, raw, path: checkpointed(run, path),
    "SavedModel": lambda run, raw, path: saved_model(run, path),
    "save_own_variables": lambda run, raw, path: own_variables(run) + numpy_of(run)[len(run.optimizer.variables) :],
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", LOOKS)
def test_what_is_kept_is_seen_as_it_is(name, dtype, tmp_path):
    ours, theirs = Run(dtype=dtype), Run(pack=False, dtype=dtype)
    raw = ours.train().kept
    assert vars(ours.optimizer)[packed._ATTRIBUTE].with_weights == (dtype == "float16")
    theirs.train()
    for number in range(3):
        ours.train(2)
        theirs.train(2)
        (tmp_path / str(number)).mkdir()
        assert ours.in_buffers
        assert_close(LOOKS[name](ours, raw, tmp_path / str(number)), numpy_of(theirs))
    assert same_bits(ours.train().state(), Run(dtype=dtype).train(8).state())


def restored(run, values, path):
    other = Run(pack=False, dtype=run.dtype).train(0)
    other.optimizer.build(other.masters.weights)
    assign_all(other.kept, values)
    tf.train.Checkpoint(optimizer=run.optimizer, masters=run.masters).read(
        tf.train.Checkpoint(optimizer=other.optimizer, masters=other.masters).write(str(path / "put"))
    ).assert_consumed()


def assign_all(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


PUTS = {
    "assign": lambda run, raw, values, path: assign_all(run.kept, values),
    "held since before": lambda run, raw, values, path: assign_all(raw, values),
    "in a function": lambda run, raw, values, path: tf.function(lambda: assign_all(raw, values))(),
    "checkpoint": lambda run, raw, values, path: restored(run, values, path),
    "load_own_variables": lambda run, raw, values, path: (
        run.optimizer.load_own_variables(dict(enumerated(values[: len(run.optimizer.variables)]))),
        assign_all(run.kept, values),
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", PUTS)
def test_what_was_assigned_is_taken_over(name, dtype, tmp_path):
    ours, theirs = Run(dtype=dtype), Run(pack=False, dtype=dtype)
    raw = ours.train().kept
    values = numpy_of(theirs.train())
    ours.train(2)
    assert ours.in_buffers
    PUTS[name](ours, raw, values, tmp_path)
    assign_all(theirs.kept, values)
    assign_all(theirs.model, [variable.numpy() for variable in ours.model])
    theirs.count = ours.count
    assert_close(ours.train(2).state(), theirs.train(2).state())


def test_one_slot_assigned_leaves_the_others(tmp_path):
    ours, theirs = Run().train(4), Run(pack=False).train(4)
    for run in (ours, theirs):
        run.optimizer._momentums[1].assign(tf.fill(SHAPES[1], 3.0))
        run.model[2].assign(tf.fill(SHAPES[2], -1.0))
        run.train(2)
    assert ours.in_buffers
    assert_close(ours.state(), theirs.state())


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_a_resumed_run_goes_on_with_the_same_bits(before, after, deferred, tmp_path):
    def everything(run):
        return tf.train.Checkpoint(model=run.model, optimizer=run.optimizer, loss_scaler=run.loss_scaler)

    first, second = Run(pack=before).train(4), Run(pack=after)
    saved = everything(first).write(str(tmp_path / "middle"))
    if not deferred:
        second.train(1)
    status = everything(second).read(saved)
    second.count = first.count
    second.train()
    status.assert_consumed()
    assert (packed._ATTRIBUTE in vars(first.optimizer), packed._ATTRIBUTE in vars(second.optimizer)) == (before, after)
    compare = same_bits if before == after else assert_close
    assert compare(first.train().state(), second.state()) in (True, None)
    assert compare(first.train(2).state(), second.train(2).state()) in (True, None)


def test_a_checkpoint_holds_what_it_would_hold_without(tmp_path):
    keys = []
    for pack in (True, False):
        run = Run(pack=pack).train(3)
        file = tf.train.Checkpoint(optimizer=run.optimizer).write(str(tmp_path / str(pack)))
        keys.append(sorted((key, tuple(shape)) for key, shape in tf.train.list_variables(file)))
        assert len(run.optimizer.variables) == 2 + 2 * len(SHAPES)
    assert keys[0] == keys[1]


WAYS = {
    "gated": lambda run: run.step(run.grads()),
    "eager": lambda run: run.apply(run.grads()),
    "whole step jit": lambda run: run.jitted(run.grads()),
    "by hand": lambda run: run.by_hand(run.grads(1.0)),
    "by hand in a function": lambda run: run.by_hand_in_a_function(run.grads(1.0)),
    "skipped": lambda run: run.step([tf.fill(shape, np.float32(np.nan)) for shape in SHAPES]),
    "look": numpy_of,
    "assign a slot": lambda run: run.optimizer._velocities[3].assign(tf.fill(SHAPES[3], 0.5)),
    "assign a weight": lambda run: run.model[0].assign(tf.fill(SHAPES[0], 0.25)),
    "save and load": lambda run: run.optimizer.load_own_variables(dict(enumerated(own_variables(run)))),
    "some gradients": lambda run: (run.part(run.grads()[:3]), run.masters.write()),
}


def enumerated(values):
    return ((str(number), value) for number, value in enumerate(values))


@pytest.mark.parametrize(("seed", "dtype"), [(0, "float32"), (1, "float16"), (2, "float32")])
def test_any_mixture_of_ways_gives_what_it_gives_without(seed, dtype):
    rng = np.random.default_rng(seed)
    runs = Run(dtype=dtype), Run(pack=False, dtype=dtype)
    for run in runs:
        run.train()
        run.part = tf.function(
            lambda grads, run=run: run.loss_scaler.apply(run.optimizer, grads, run.masters.weights[:3]).finite
        )
    gathered = 0
    for way in rng.permutation(np.concatenate([np.repeat("gated", 20), np.repeat(list(WAYS)[1:], 3)])):
        for run in runs:
            WAYS[way](run)
        gathered += runs[0].in_buffers
        if rng.random() < 0.2:
            assert_close(runs[0].state(), runs[1].state())
    assert gathered > 10
    assert_close(runs[0].state(), runs[1].state())


def test_a_graph_with_looks_and_steps_in_any_order():
    def build(run):
        @tf.function
        def look():
            return tf.add_n([tf.reduce_sum(variable.value) for variable in run.optimizer._momentums])

        @tf.function
        def mixed(grads, count):
            seen = tf.TensorArray(tf.float32, 0, dynamic_size=True)
            seen = seen.write(0, tf.reduce_sum(run.optimizer._momentums[1] + 0.0))
            run.step(grads)
            seen = seen.write(1, tf.reduce_sum(run.optimizer._momentums[1] + 0.0)).write(2, look())
            for _ in tf.range(count):
                run.step(grads)
                if tf.equal(count, 2):
                    seen = seen.write(seen.size(), tf.reduce_sum(run.optimizer._velocities[0] + 0.0))
                run.optimizer._momentums[0].assign_add(tf.ones(SHAPES[0]))
            run.step(grads)
            seen = seen.write(seen.size(), look())
            run.step(grads)
            return seen.stack()

        return mixed

    runs = Run().train(), Run(pack=False).train()
    ours, theirs = (build(run) for run in runs)
    grads = runs[0].grads()
    for count in (0, 1, 2, 5):
        assert_close([ours(grads, count).numpy()], [theirs(grads, count).numpy()])
        assert runs[0].in_buffers
    assert_close(runs[0].state(), runs[1].state())


def test_a_loop_in_the_graph_gives_the_bits_of_single_steps():
    loop, single = Run(), Run()
    grads = loop.grads()

    @tf.function
    def steps(count):
        for _ in tf.range(count):
            loop.apply(grads)

    steps(tf.constant(5))
    for _ in range(5):
        single.step(grads)
    assert loop.in_buffers
    assert same_bits(loop.state(), single.state())


def test_a_step_that_breaks_off_leaves_the_slots_as_they_were():
    run = Run().train(2)
    run.count += 1

    @tf.function
    def broken(grads, fine):
        tf.debugging.assert_equal(fine, True)
        return run.apply(grads)

    broken(run.grads(), True)
    for look in (False, True):
        before = numpy_of(run) if look else None
        with pytest.raises(tf.errors.InvalidArgumentError):
            broken(run.grads(), False)
        assert run.in_buffers != look
        assert before is None or same_bits(before, numpy_of(run))
        run.train()
    run.optimizer._momentums[0].assign(tf.zeros(SHAPES[0]))
    with pytest.raises(tf.errors.InvalidArgumentError):
        broken(run.grads(), False)
    assert not run.optimizer._momentums[0].numpy().any()


def test_masters_that_a_function_was_traced_with_are_not_kept_in_a_buffer():
    """It reads and assigns them without asking anybody."""
    ours, theirs = Run(dtype="float16"), Run(pack=False, dtype="float16")
    norms = {run: tf.function(lambda run=run: [tf.norm(v) for v in run.masters.weights]) for run in (ours, theirs)}
    for run in (ours, theirs):
        norms[run]()
        run.train(4)
    assert ours.in_buffers
    assert not vars(ours.optimizer)[packed._ATTRIBUTE].with_weights
    assert_close([norm.numpy() for norm in norms[ours]()], [norm.numpy() for norm in norms[theirs]()])
    assert_close(ours.state(), theirs.state())


def test_masters_in_a_buffer_are_left_to_who_uses_them_as_variables():
    ours, theirs = Run(dtype="float16").train(4), Run(pack=False, dtype="float16").train(4)
    for run in (ours, theirs):
        step = tf.function(
            lambda grads, run=run: run.loss_scaler.apply(run.optimizer, grads, run.masters.weights).finite
        )
        for _ in range(2):
            step(run.grads())
        run.masters.write()
        run.train(2)
    assert ours.in_buffers
    assert_close(ours.state(), theirs.state())


def test_gradients_of_unknown_shape_are_joined_too():
    ours, theirs = Run(), Run(pack=False)
    for run in (ours, theirs):

        @tf.function
        def step(grads, run=run):
            return run.apply([tf.numpy_function(lambda grad: grad, [grad], tf.float32) for grad in grads])

        for _ in range(3):
            step(run.grads())
    assert_close(ours.state(), theirs.state())


@pytest.mark.parametrize("way", ["function", "when", "loop"])
def test_a_step_inside_of_another_graph_waits_for_slots_that_were_assigned_before(way):
    run = Run(OPTIMIZERS["momentum"]).train(2)
    inner = tf.function(run.apply)
    zeros = [tf.zeros(shape) for shape in SHAPES]

    def slowly(value):
        time.sleep(0.01)
        return value

    def step(flag):
        if way == "function":
            inner(zeros)
        elif way == "when":
            run.loss_scaler.apply(run.optimizer, zeros, run.model, when=flag)
        else:
            tf.while_loop(lambda i: i < 1, lambda i: (inner(zeros), i + 1)[1:], [0])

    @tf.function(autograph=False)
    def outer(flag):
        for slot, shape in zip(run.optimizer.momentums, SHAPES, strict=True):
            slot.assign(tf.ensure_shape(tf.numpy_function(slowly, [tf.ones(shape)], tf.float32), shape))
        step(flag)

    for _ in range(2):
        before = [variable.numpy() for variable in run.model]
        outer(tf.constant(True))
        moved = [variable.numpy() - old for variable, old in zip(run.model, before, strict=True)]
        for difference in moved:
            np.testing.assert_allclose(difference, 0.9, rtol=1e-5)


@pytest.mark.parametrize("bad", range(5))
def test_a_skip_names_the_gradient_among_packed_and_others(bad, monkeypatch):
    """The larger ones are not packed, and one variable has no gradient."""
    monkeypatch.setattr(packed, "_LARGEST", 6)
    sizes = (8, 4, 5, 9, 3)
    weights = [tf.Variable(tf.ones([size])) for size in sizes]
    optimizer, loss_scaler = keras.optimizers.Adam(0.1), scaler.LossScaler(scaler.Static(8.0))
    step = tf.function(lambda grads: loss_scaler.apply(optimizer, [*grads[:2], None, *grads[2:]], weights))
    weights.insert(2, tf.Variable([1.0]))
    step([tf.ones([size]) for size in sizes])
    assert len(vars(optimizer)[packed._ATTRIBUTE].weights) == 3
    outcome = step([tf.fill([size], np.inf if place >= bad else 1.0) for place, size in enumerate(sizes)])
    assert int(outcome.index) == bad + (bad >= 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.Lamb(0.1),
        lambda: type("Own", (keras.optimizers.Adam,), {})(0.1),
        lambda: keras.optimizers.Adam(0.1, use_ema=True),
        lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
        lambda: keras.optimizers.Adam(0.1, clipnorm=1.0),
    ],
)
def test_others_are_left_alone(make):
    run = Run(make).train()
    assert packed._ATTRIBUTE not in vars(run.optimizer)


def test_an_optimizer_that_was_built_elsewhere_is_left_alone():
    run = Run()
    run.optimizer.build(run.model)
    assert packed._ATTRIBUTE not in vars(run.train().optimizer)
    jitted = Run()
    jitted.jitted(jitted.grads())
    assert packed._ATTRIBUTE not in vars(jitted.optimizer)
