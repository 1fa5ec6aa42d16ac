"""Compiled updates give the optimizer's own numbers, for every optimizer, and a skipped one changes nothing."""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import weight_cases
from scaler_cases import BAD, by_hand, compile_updates, laid_out, random_gradients

import scaler
from scaler.gate import joined, propose, targets

OPTIMIZERS = {
    "EMA": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, nesterov=True, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}
STEPS = 4


@pytest.fixture
def updates_made(monkeypatch):
    return compile_updates(monkeypatch, 1.5)


def weights(dtype):
    rng = np.random.default_rng(0)
    return [
        keras.Variable(rng.normal(size=shape), dtype=dtype, name=f"weight_{len(shape)}_{shape[0]}")
        for shape in ((3, 4), (2, 3, 2))
    ]


def train(optimizer, dtype="float32", clip_norm=None, loss_scale=8.0, wrap=tf.function):
    """The variables of each step's end, masters and slots included, and the optimizer's count."""
    model = weights(dtype)
    masters = scaler.MasterWeights(model)
    optimizer.build(masters.weights)
    loss_scaler = by_hand(scaler.Static(loss_scale))

    step = wrap(lambda grads: loss_scaler.apply(optimizer, grads, masters, clip_norm=clip_norm))
    seen = []
    for number in range(STEPS):
        outcome = step(random_gradients(number, dtype, model, loss_scale))
        assert bool(outcome.finite) == (number != BAD)
        everything = [*model, *masters.weights, *optimizer.variables]
        seen.append([tf.convert_to_tensor(variable).numpy().astype(np.float64) for variable in everything])
    assert wrap is eager or step.experimental_get_tracing_count() == 1
    return seen


def eager(step):
    """Nothing is compiled in eager mode: what an optimizer does by itself, without the price of a trace."""
    return step


@functools.cache
def decayed_by_itself(kind):
    """What an optimizer with weight decay does by itself to masters and their model: the same for each layout."""
    return train(kind(0.01, weight_decay=0.1), "float16", 0.5, wrap=eager)


def same_bits(before, after):
    return all(one.tobytes() == other.tobytes() for one, other in zip(before, after, strict=True))


@pytest.mark.slow_with("accumulation")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_moves_as_it_does_by_itself(name, updates_made):
    ours = train(OPTIMIZERS[name]())
    assert bool(updates_made) == (name not in ("clipnorm", "accumulation"))
    own = train(OPTIMIZERS[name](), wrap=eager)
    assert same_bits(ours[BAD - 1], ours[BAD])
    for mine, theirs in zip(ours, own, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def test_a_keras_without_multi_optimizers_compiles_too(updates_made, monkeypatch):
    monkeypatch.delattr(keras.optimizers, "MultiOptimizer", raising=False)
    (*_, last) = train(keras.optimizers.SGD(0.1))
    assert updates_made
    steps = [step for step in range(STEPS) if step != BAD]
    moved = sum(np.asarray(random_gradients(step, "float32", weights("float32"), 1.0)[0]) for step in steps)
    np.testing.assert_allclose(last[0], weights("float32")[0].numpy() - 0.1 * moved, rtol=1e-5)


@pytest.mark.parametrize("layout", ["compiled", "by itself", "called"])
def test_masters_are_updated_clipped_and_rounded(layout, monkeypatch):
    """By optimizers with slots and weight decay. One of them has a compiled function for each variable by itself."""
    kind = keras.optimizers.RMSprop if layout == "by itself" else keras.optimizers.AdamW
    monkeypatch.setattr(propose, "_WORTH_CALLING", 1)
    updates_made = laid_out(monkeypatch) if layout == "called" else compile_updates(monkeypatch, 1.5)
    ours = train(kind(0.01, weight_decay=0.1), "float16", 0.5)
    assert updates_made
    for mine, theirs in zip(ours, decayed_by_itself(kind), strict=True):
        for model, master in zip(mine[:2], mine[2:4], strict=True):
            np.testing.assert_array_equal(
                model, tf.cast(tf.constant(master, tf.float32), "float16").numpy().astype(float)
            )
        for one, other in zip(mine[2:], theirs[2:], strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


class AtMost99(keras.constraints.Constraint):
    def __call__(self, w):
        return tf.minimum(w, 99.0)


class Descent(keras.optimizers.SGD):
    """Arithmetic that nothing is known of."""


Descent.__module__ = keras.optimizers.SGD.__module__


@pytest.mark.parametrize("kind", [keras.optimizers.SGD, Descent])
def test_weights_that_were_assigned_are_taken_over(kind, updates_made):
    """The first has a constraint, which comes before the rounding."""
    model = weights("float16")
    model[0].constraint = AtMost99()
    masters, optimizer = scaler.MasterWeights(model), kind(1.0)
    loss_scaler = by_hand(scaler.Static(2.0))
    step = tf.function(lambda grads: loss_scaler.apply(optimizer, grads, masters))
    ones = [tf.ones(variable.shape, "float16") for variable in model]
    step(ones)
    for variable in model:
        variable.assign(tf.fill(variable.shape, 100.0))
    step(ones)
    assert updates_made
    for variable, master, wanted in zip(model, masters.weights, (99.0, 99.5), strict=True):
        np.testing.assert_array_equal(tf.convert_to_tensor(variable), np.full(variable.shape, wanted))
        np.testing.assert_array_equal(master, np.full(variable.shape, wanted))


def test_embedding_gradients_go_beside_the_clusters(updates_made):
    table, kernel = tf.Variable(tf.zeros([5, 2])), tf.Variable(tf.zeros([4, 4]))
    other = tf.Variable(tf.zeros([2]))
    optimizer, loss_scaler = keras.optimizers.SGD(1.0), by_hand(scaler.Static(4.0))

    @tf.function
    def step():
        rows = tf.IndexedSlices(4.0 * tf.ones([3, 2]), tf.constant([1, 3, 1]), tf.constant([5, 2]))
        grads = [rows, 4.0 * tf.ones([4, 4]), None, 4.0 * tf.ones([2])]
        return loss_scaler.apply(optimizer, grads, [table, kernel, unused, other])

    unused = tf.Variable(1.0)
    with pytest.warns(scaler.ScaleWarning, match="no gradient for 'Variable'"):
        assert bool(step().finite)
    assert updates_made
    np.testing.assert_array_equal(table[:, 0], [0, -2, 0, -1, 0])
    np.testing.assert_array_equal(kernel, -np.ones([4, 4]))
    assert (unused.numpy(), other.numpy().tolist()) == (1.0, [-1.0, -1.0])


@pytest.mark.slow
def test_a_loop_in_the_graph_gives_the_bits_of_single_steps(updates_made):
    grads = [random_gradients(0, "float32", weights("float32"))] * 5

    def run(in_graph):
        model, optimizer = weights("float32"), keras.optimizers.Adam(0.01)
        loss_scaler = by_hand(scaler.Static(8.0))

        @tf.function
        def steps(count):
            for _ in tf.range(count):
                loss_scaler.apply(optimizer, grads[0], model)

        for _ in range(1 if in_graph else 5):
            steps(tf.constant(5 if in_graph else 1))
        return [tf.convert_to_tensor(variable).numpy() for variable in (*model, *optimizer.variables)]

    assert same_bits(run(True), run(False))
    assert updates_made


@pytest.mark.usefixtures("updates_made")
def test_variables_of_one_shape_share_what_xla_compiles():
    shapes = ((3, 4), (2, 3, 2), (3, 4))
    model, loss_scaler = [tf.Variable(tf.ones(shape)) for shape in shapes], by_hand(scaler.Static(8.0))
    optimizer = keras.optimizers.Adam(0.1)

    def compiled(clip):
        step = tf.function(lambda: loss_scaler.apply(optimizer, list(map(tf.ones, shapes)), model, clip=clip))
        graph = step.get_concrete_function().graph.as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        names = [node.attr["f"].func.name for node in nodes]
        found = [name for name in names if "compiled_update" in name]
        return len(found), len(set(found))

    # Each is clipped by a factor of its own.
    assert [compiled(None), compiled(scaler.ClipByNorm(1.0))] == [(3, 2), (3, 3)]


def test_clusters_are_of_about_the_same_cost():
    variables = [tf.Variable(tf.zeros([size])) for size in (10, 300_000, 20, 500_000, 40, 200_000, 900_000)]
    groups = propose.balanced([(None, variable) for variable in variables])
    loads = sorted(sum(variable.shape.num_elements() for _, variable in group) for group in groups)
    assert (len(groups), loads[0] > 400_000, loads[-1] == 900_000) == (4, False, True)
    assert sorted(id(v) for group in groups for _, v in group) == sorted(map(id, variables))


def test_small_models_and_eager_steps_are_left_alone():
    optimizer = keras.optimizers.SGD()
    small, large = (tf.Variable(tf.zeros([size])) for size in (10, 2**20))
    optimizer.build([small, large])

    def worth(variable):
        grads = [tf.zeros(variable.shape)]
        joint = joined.Joined(tf.distribute.get_strategy(), grads)
        return propose.propose(targets.Part(optimizer, [variable], [0]), grads, joint) is not None

    found = [worth(large)]
    for variable, in_xla in ((small, False), (large, True), (large, False)):
        ask = tf.function(lambda own=variable: found.append(worth(own)), autograph=False, jit_compile=in_xla)
        ask.get_concrete_function()
    assert found == [False, False, False, True]


@pytest.mark.parametrize(("optimizer", "powers"), [(keras.optimizers.Adam, 2), (keras.optimizers.SGD, 0)])
def test_arithmetic_is_traced_once_for_several_variables(optimizer, powers):
    model, loss_scaler = [tf.Variable(tf.ones([3, size])) for size in range(2, 6)], by_hand(scaler.Static(8.0))
    made = optimizer(0.1)

    @tf.function
    def step():
        loss_scaler.apply(made, [tf.ones(own.shape) for own in model], model)

    kinds = collections.Counter(weight_cases.all_operations(step.get_concrete_function().graph))
    assert kinds["Pow"] == powers
    # To call a function for what is one subtraction would only take time to trace.
    assert kinds["PartitionedCall"] == (len(model) if powers else 0)


def met(jit_compile):
    """The order in which a step of four variables meets masters and slots."""
    model = [tf.Variable(tf.ones([3, 4], tf.float16)) for _ in range(4)]
    masters, optimizer = scaler.MasterWeights(model), keras.optimizers.SGD(0.1, momentum=0.9)
    loss_scaler = by_hand(scaler.Static(8.0))

    @tf.function(jit_compile=jit_compile)
    def step():
        loss_scaler.apply(optimizer, [tf.ones_like(own) for own in model], masters)

    traced = step.get_concrete_function()
    own = [*masters.weights, *optimizer.variables]
    natives = [one.value if isinstance(one, keras.Variable) else one for one in own]
    names = {id(native.handle): place for place, native in enumerate(natives)}
    return [names[id(handle)] for handle in traced.captured_inputs if id(handle) in names]


@pytest.fixture(scope="module")
def met_in_xla():
    return met(True)


@pytest.mark.parametrize("layout", ["called", "compiled", "joined"])
def test_a_layout_meets_variables_in_the_order_of_a_step_that_xla_compiles(layout, monkeypatch, met_in_xla):
    """By this order a checkpoint of a step by hand knows them, and a resumed run may have another layout."""
    if layout == "compiled":
        compile_updates(monkeypatch, 1.5)
    if layout == "joined":
        monkeypatch.setattr(joined, "_WORTH_JOINING", 4)
    assert met(None) == met_in_xla


def test_a_variable_given_twice_is_clipped_by_each_gradient_by_itself(updates_made):
    moved = []
    for repeated in (False, True):
        weight, loss_scaler = tf.Variable(tf.zeros([64, 64])), scaler.LossScaler(scaler.Static(1.0))
        grads = [tf.fill([64, 64], 1.0), tf.fill([64, 64], 100.0)]
        optimizer = keras.optimizers.SGD(1.0)
        step = tf.function(lambda g, w, s=loss_scaler, o=optimizer: s.apply(o, g, w, clip=scaler.ClipByNorm(64.0)))
        if repeated:
            step(grads, [weight, weight])
        else:
            for grad in grads:
                step([grad], [weight])
        moved.append(weight.numpy())
    np.testing.assert_allclose(moved[1], moved[0], rtol=1e-5)
