"""Updates of packed variables give what those of each by itself give, in any order of everything else."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from packed_cases import (
    BAD,
    OPTIMIZERS,
    SHAPES,
    Run,
    assert_close,
    enumerated,
    make_five_enough,
    numpy_of,
    own_variables,
    same_bits,
)
from scaler_cases import by_hand

import scaler
from scaler import clusters, packed


@pytest.fixture(autouse=True)
def small(monkeypatch):
    make_five_enough(monkeypatch)


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
    optimizer, loss_scaler = keras.optimizers.Adam(0.1), by_hand(scaler.Static(8.0))
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
