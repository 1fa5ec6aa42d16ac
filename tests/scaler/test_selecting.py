"""A step that selects its new values moves what a step that branches moves, bit for bit, and takes no branch."""

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
import ways
from mirrored import mirrored, one_for_each
from rigs import raw
from scaler_cases import gradients_of, take

import loops
import scaler
from scaler.errors import InvalidArgument
from scaler.gate import joined, propose

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(1e-2),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "decay and averages": lambda: keras.optimizers.AdamW(
        1e-2, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=3
    ),
}


def batches(count=12):
    """A forward pass that overflows, a NaN, and healthy ones between."""
    rng = np.random.default_rng(0)
    for number in range(count):
        x = rng.standard_normal((8, 6)).astype(np.float32)
        x *= np.float32(1e6 if number in (2, 3) else 1.0)
        x[1, 2] = np.nan if number == 6 else x[1, 2]
        yield tf.constant(x), tf.constant(rng.integers(0, 4, 8))


def trained(select, optimizer, policy="mixed_float16", **options):
    """All that a run of twelve steps left, as bytes, and what its steps returned."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    hidden = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(dtype="float32")]
    head = keras.layers.Dense(4, dtype="float32")
    model = keras.Sequential([keras.Input([6]), *hidden, keras.layers.Dropout(0.2, seed=1), head])
    loss_scaler = scaler.LossScaler(scaler.Dynamic(growth_interval=2), select=select)
    step = loops.TrainStep(model, LOSS, OPTIMIZERS[optimizer](), loss_scaler=loss_scaler, **options)
    call = tf.function(step)
    outputs = [{name: value.numpy() for name, value in call(batch).items()} for batch in batches()]
    masters = step.masters.variables if step.masters else ()
    state = (loss_scaler._stored.floats.variable, loss_scaler._stored.counts.variable)
    return raw([*model.variables, *step.optimizer.variables, *state, *masters]), outputs


CASES = [
    ("adam", "mixed_float16", {}),
    pytest.param("momentum", "mixed_bfloat16", {"clip": scaler.ClipByValue(1e-2)}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("optimizer", "policy", "options"), CASES, ids=str)
def test_a_run_is_the_same_bit_for_bit(optimizer, policy, options, monkeypatch):
    monkeypatch.setattr(joined, "_WORTH_JOINING", 4)
    (selected, outputs), (default, told), (branched, expected) = (
        trained(way, optimizer, policy, **options) for way in (True, None, False)
    )
    assert selected == default == branched
    if not ways.selects("graph"):
        # A small step selects, and explains as one that branches.
        assert [output["cause"] for output in told] == [output["cause"] for output in expected]
    assert [output["applied"] for output in outputs] == [output["applied"] for output in expected]
    # A second look may have told an overflow to be none.
    assert [output["cause"] > 0 for output in outputs] == [output["cause"] > 0 for output in expected]
    assert 0 < sum(output["applied"] for output in outputs) < len(outputs)


@pytest.mark.slow_with("adam-True")
@pytest.mark.parametrize(("optimizer", "jit_compile"), [("adam", True), ("decay and averages", False)])
def test_updates_that_are_compiled_in_groups_are_selected_too(optimizer, jit_compile, monkeypatch):
    """A skip leaves every bit. XLA may round what is applied in another way."""
    monkeypatch.setattr(propose, "_WORTH_COMPILING", 1)
    left = {}
    for select in (True, False):
        variables = [tf.Variable(tf.linspace(0.5, 1.5, 3)), tf.Variable(tf.ones([2, 2]))]
        made, loss_scaler = OPTIMIZERS[optimizer](), scaler.LossScaler(scaler.Dynamic(8.0), select=select)
        made.build(variables)

        def step(x, variables=variables, made=made, loss_scaler=loss_scaler):
            def squares():
                return tf.add_n([tf.reduce_sum(tf.square(one) * x) for one in variables])

            return take(loss_scaler, made, squares, variables, clip_norm=1.0).finite

        if select:  # The other is to compare with.
            step = tf.function(step, jit_compile=jit_compile or None)
        state = [*variables, *made.variables]
        for x in (1.0, 3e38, 0.5, float("nan"), 2.0):
            before = raw(state)
            finite = bool(step(tf.constant(x)))
            assert finite is (x < 10.0)
            assert (raw(state) == before) is not finite
        left[select] = [np.asarray(variable) for variable in state]
    for selected, branched in zip(*left.values(), strict=True):
        np.testing.assert_allclose(selected, branched, rtol=1e-5)


class Given:
    """Gradients applied to variables of chosen values in each way, traced once; None is that of a small step."""

    def __init__(self):
        self.ways = {}
        for select in (True, None, False):
            variables = [tf.Variable(tf.zeros([4])), tf.Variable(tf.zeros([3, 2]))]
            optimizer = keras.optimizers.SGD(0.5)
            optimizer.build(variables)
            loss_scaler = scaler.LossScaler(scaler.Static(8.0), select=select)

            def apply(dense, rows, indices, optimizer=optimizer, variables=variables, loss_scaler=loss_scaler):
                grads = [dense, tf.IndexedSlices(rows, indices, [3, 2])]
                return loss_scaler.apply(optimizer, grads, variables, unscaled=True).finite

            self.ways[select] = tf.function(apply), variables

    def __call__(self, select, weights, dense, rows, indices):
        apply, variables = self.ways[select]
        for variable, value in zip(variables, weights, strict=True):
            variable.assign(value)
        return bool(apply(dense, rows, indices)), raw(variables)


@pytest.fixture(scope="module")
def given():
    return Given()


BITS = [0x00000001, 0x807FFFFF, 0x80000000, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000, 0x477FE000, 0x477FF000]
"""Subnormals, -0.0, the smallest and largest float32 numbers, 1, 65504 and 65520."""
WEIGHTS = st.lists(st.sampled_from(BITS), min_size=10, max_size=10)
VALUES = st.sampled_from([0.0, -0.0, 1.0, -3.5, 65504.0, 2.0**-24, 1e20, float("inf"), float("-inf"), float("nan")])


@hypothesis.given(
    WEIGHTS, st.lists(VALUES, min_size=8, max_size=8), st.lists(st.integers(0, 2), min_size=2, max_size=2)
)
def test_a_skip_keeps_every_bit_also_of_rows_that_occur_twice(given, patterns, values, indices):
    held = np.array(patterns, np.uint32).view(np.float32)
    weights = held[:4], held[4:].reshape(3, 2)
    dense, rows = np.float32(values[:4]), np.float32(values[4:]).reshape(2, 2)
    arguments = [tf.constant(value) for value in (dense, rows, np.int64(indices))]
    selected, default, branched = (given(way, weights, *arguments) for way in (True, None, False))
    assert selected == default == branched
    if not selected[0]:
        assert selected[1] == raw(weights)


def test_xla_is_given_no_branch():
    variable, optimizer = tf.Variable([1.0, 2.0]), keras.optimizers.SGD()
    optimizer.build([variable])
    loss_scaler = scaler.LossScaler()

    @tf.function(jit_compile=True)
    def step(x):
        return take(loss_scaler, optimizer, lambda: tf.reduce_sum(variable * x), [variable], clip_norm=1.0).finite

    program = step.experimental_get_compiler_ir(tf.constant([1.0, 2.0]))(stage="hlo")
    assert (program.count("conditional(") > 0) is not ways.selects("xla")


@pytest.mark.parametrize("optimizer", [keras.optimizers.Adafactor(), lambda grads, variables: None])
def test_an_optimizer_that_does_not_fit_is_refused(optimizer):
    variable, loss_scaler = tf.Variable([1.0, 2.0]), scaler.LossScaler(select=True)

    @tf.function
    def step():
        return take(loss_scaler, optimizer, lambda: tf.reduce_sum(variable), [variable]).finite

    with pytest.raises(InvalidArgument, match=r"select=True.*Expected SGD, Adam.*or select=None"):
        step()
    np.testing.assert_array_equal(variable, [1.0, 2.0])


@pytest.mark.parametrize("value", ["gpu", 1, 0, np.True_, tf.constant(False), []], ids=str)
def test_no_other_value_is_taken(value):
    with pytest.raises(InvalidArgument, match=r"LossScaler\(select=.*expected True or False, or None"):
        scaler.LossScaler(select=value)
    with pytest.raises(InvalidArgument, match="expected True or False, or None"):
        scaler.LossScaleOptimizer(keras.optimizers.Adam(), select=value)


@pytest.mark.parametrize(
    ("options", "runs", "said"),
    [
        ({"use_ema": True, "ema_overwrite_frequency": 2}, tf.function, "ema_overwrite_frequency=2 on several replicas"),
        ({"gradient_accumulation_steps": 2}, tf.function, "gradient_accumulation_steps=2, and Keras cannot add"),
        ({"gradient_accumulation_steps": 2}, lambda run: run, "gradient_accumulation_steps=2, and Keras cannot add"),
    ],
)
def test_what_keras_cannot_do_on_replicas_is_refused(options, runs, said):
    strategy = mirrored(2)
    with strategy.scope():
        variable, loss_scaler = tf.Variable([1.0, 2.0]), scaler.LossScaler()
        optimizer = keras.optimizers.Adam(**options)

    def step():
        return take(loss_scaler, optimizer, lambda: tf.reduce_sum(variable), [variable]).finite

    with pytest.raises(InvalidArgument, match=said):
        runs(lambda: strategy.run(step))()


def test_all_replicas_skip_where_one_overflows():
    strategy = mirrored(2)
    with strategy.scope():
        variable, moved = tf.Variable([1.0, 2.0]), tf.Variable(0.0, trainable=False)
        optimizer, loss_scaler = keras.optimizers.Adam(0.5), scaler.LossScaler(select=True)
        optimizer.build([variable])

    def step(x):
        before = scaler.snapshot([moved])
        moved.assign_add(1.0)
        grads = gradients_of(loss_scaler, lambda: tf.reduce_sum(variable * x), [variable])
        outcome = loss_scaler.apply(optimizer, grads, [variable], clip_norm=1.0, rollback=before)
        return outcome.finite, outcome.replica

    run = tf.function(lambda xs: strategy.run(step, [xs]))

    def given(values):
        finite, replica = run(one_for_each(strategy, tf.constant(values)))
        return bool(strategy.experimental_local_results(finite)[0]), int(
            strategy.experimental_local_results(replica)[0]
        )

    state = [variable, moved, *optimizer.variables]
    natives = [v if isinstance(v, tf.Variable) else v.value for v in state]
    everywhere = [part for native in natives for part in strategy.experimental_local_results(native)]
    assert given([1.0] * 2) == (True, -1)
    before = raw(everywhere)
    for bad in range(2):
        assert given([3e38 if number == bad else 1.0 for number in range(2)]) == (False, bad)
        assert raw(everywhere) == before
    assert given([1.0] * 2) == (True, -1)
    assert raw(everywhere) != before


def test_fit_takes_it_and_saves_it():
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.Adam(), select=True)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert again.loss_scaler.select is True
    assert "select" not in scaler.LossScaleOptimizer(keras.optimizers.Adam()).get_config()


class Selecting:
    """A step that selects, of a weight and Adam, traced once: for a window, and with a limit of its own."""

    def __init__(self):
        self.variable, optimizer = tf.Variable([1.0, 2.0], name="w"), keras.optimizers.Adam()
        optimizer.build([self.variable])
        self.loss_scaler = scaler.LossScaler(scaler.Dynamic(growth_interval=1), select=True)
        self.moved = [self.variable, *optimizer.variables]
        own = [self.loss_scaler._stored.floats.variable, self.loss_scaler._stored.counts.variable]
        self.state = [*self.moved, *own]
        self.start = [(one, one.numpy()) for one in (*self.moved, *self.loss_scaler.variables)]

        @tf.function
        def step(when, x, limit):
            def loss():
                return tf.reduce_sum(tf.square(self.variable)) * x

            return take(self.loss_scaler, optimizer, loss, [self.variable], when=when, clip_norm=limit)

        self.step = step

    def __call__(self, when=True, x=1.0, limit=1.0):
        return self.step(tf.constant(when), tf.constant(x), tf.constant(limit))


@pytest.fixture(scope="module")
def made():
    return Selecting()


@pytest.fixture
def selecting(made):
    for variable, value in made.start:
        variable.assign(value)
    return made


def test_an_update_by_hand_is_selected_for_a_window_that_is_not_complete(selecting):
    """`when`: nothing moves in between, and the strategy and the counters do not either."""
    before = raw(selecting.state)
    for x in (1.0, float("nan")):
        outcome = selecting(when=False, x=x)
        assert not bool(outcome.finite)
        assert int(outcome.cause) == scaler.Cause.NONE
        assert np.isnan(outcome.grad_norm)
        assert raw(selecting.state) == before
    assert int(selecting.loss_scaler.last_skip.cause) == scaler.Cause.NONE
    assert bool(selecting().finite)
    assert int(selecting.loss_scaler.counters.attempted) == 1


def test_a_limit_that_is_none_skips_and_is_remembered(selecting):
    for none in (float("nan"), 0.0):
        before = raw(selecting.moved)
        outcome = selecting(limit=none)
        assert not bool(outcome.finite)
        assert (int(outcome.cause), int(outcome.index)) == (scaler.Cause.UPDATE, -2)
        assert raw(selecting.moved) == before
        assert bool(selecting().finite)
        assert int(selecting.loss_scaler.last_skip.cause) == scaler.Cause.UPDATE


def test_explain_looks_at_the_weights(selecting):
    assert bool(selecting().finite)
    assert "No step was skipped yet" in selecting.loss_scaler.explain()
    selecting.variable.assign([1.0, float("nan")])
    assert not bool(selecting().finite)
    assert "the weight 'w:0' is already non-finite, and so is the loss" in selecting.loss_scaler.explain()
