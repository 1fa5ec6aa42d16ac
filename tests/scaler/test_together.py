"""Guards one decision about several optimizers: all of them move or none does, and the step is counted once."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import SGD
from rigs import raw
from scaler_cases import plain_descent, said

import loops
import scaler


class Spoiled(SGD):
    """Makes NaN of the gradients of a step whose number, from 1, is in `steps`."""

    def __init__(self, steps):
        super().__init__(0.5, momentum=0.9)
        self.steps = steps

    def update_step(self, gradient, variable, learning_rate):
        now = tf.reduce_any(tf.equal(tf.cast(self.iterations, tf.int32) + 1, tf.constant(self.steps, tf.int32)))
        super().update_step(tf.where(now, tf.fill(gradient.shape, float("nan")), gradient), variable, learning_rate)


class Two:
    """Two weights, the second in float16 behind a master, with an optimizer each, a statistic, and one scaler."""

    def __init__(self, mode, second, strategy=None, select=None, replicas=1):
        self.devices = tf.distribute.MirroredStrategy([f"CPU:{at}" for at in range(replicas)]) if replicas > 1 else None
        with self.devices.scope() if self.devices else tf.init_scope():
            self.weights = [tf.Variable([1.0, -1.0], name="a"), tf.Variable(tf.cast([2.0, 3.0], tf.float16), name="b")]
            self.statistic = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.MEAN)
            self.masters = scaler.MasterWeights(self.weights[1:])
            self.optimizers = [SGD(0.1, momentum=0.9), second()]
            strategy = scaler.Dynamic(8.0, growth_interval=2) if strategy is None else strategy
            self.loss_scaler = scaler.LossScaler(strategy, select=select)
        self.step = self._step if mode == "eager" else tf.function(self._step, jit_compile=mode == "xla")

    def _take(self, factor, when):
        before = scaler.snapshot([self.statistic])
        a, b = self.weights
        with tf.GradientTape() as tape:
            self.statistic.assign_add(1.0)
            loss = tf.reduce_sum(a * factor) + tf.reduce_sum(tf.cast(b, tf.float32) ** 2)
            scaled = self.loss_scaler.scale(loss)
        grads = tape.gradient(scaled, self.weights)
        shares = [
            scaler.Share(self.optimizers[0], grads[:1], [a]),
            scaler.Share(self.optimizers[1], grads[1:], self.masters, clip_norm=1.0),
        ]
        outcome, each = scaler.apply_together(self.loss_scaler, shares, rollback=before, when=when)
        return outcome.finite, outcome.cause, [one.finite for one in each]

    def _step(self, factor, when):
        if not self.devices:
            return self._take(factor, when)
        found = self.devices.run(self._take, (factor, when))
        return tf.nest.map_structure(lambda one: self.devices.experimental_local_results(one)[0], found)

    def bits(self):
        optimizers = [variable for one in self.optimizers for variable in one.variables]
        return raw([*self.weights, *self.masters.weights, self.statistic, *optimizers])

    def counts(self):
        return [int(count) for count in self.loss_scaler.counters]


@pytest.mark.slow_with("2-eager-None", "1-graph-True", "1-xla-True")
@pytest.mark.parametrize(
    ("replicas", "mode", "select"),
    [(1, "eager", None), (1, "graph", None), (1, "graph", True), (1, "xla", True), (2, "eager", None)],
)
def test_where_one_cannot_move_none_has_and_the_step_is_a_skip(replicas, mode, select):
    # A transaction is what looks at the optimizer here, and it never selects.
    two = Two(mode, lambda: SGD(0.5) if select else Spoiled([2]), select=select, replicas=replicas)
    second = two.optimizers[1]
    gone = tf.constant(1.0), tf.constant(True)
    assert all(map(bool, tf.nest.flatten(two.step(*gone)[2])))
    before, scale = two.bits(), float(two.loss_scaler.loss_scale)
    if select:
        second.learning_rate.assign(float("nan"))
        before = two.bits()
    finite, cause, each = two.step(*gone)
    assert not finite
    assert cause == scaler.Cause.UPDATE
    assert not any(map(bool, each))
    assert two.bits() == before
    assert two.counts() == [2, 1, 1, 1]
    assert float(two.loss_scaler.loss_scale) == scale / 2
    assert two.loss_scaler.last_skip.cause == scaler.Cause.UPDATE
    if select:
        second.learning_rate.assign(0.5)
    else:
        second.steps.clear()
        two.step = two._step
    finite, cause, each = two.step(*gone)
    assert finite
    assert cause == scaler.Cause.NONE
    assert two.counts() == [3, 2, 1, 0]
    assert two.bits() != before


def test_an_overflow_and_a_step_that_is_none_are_counted_as_by_apply():
    """The strategy wants statistics, which come from the judgement."""
    strategy = scaler.Histogram()
    two, alone = Two("eager", lambda: SGD(0.1), strategy), scaler.LossScaler(strategy)
    weights = [tf.Variable([1.0, -1.0]), tf.Variable(tf.cast([2.0, 3.0], tf.float16))]
    masters = scaler.MasterWeights(weights[1:])

    def by_apply(factor, when):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights[0] * factor) + tf.reduce_sum(tf.cast(weights[1], tf.float32) ** 2)
            scaled = alone.scale(loss)
        grads = tape.gradient(scaled, weights)
        return alone.apply(scaler.move_nothing, grads, [weights[0], *masters.weights], when=when)

    for factor, when in [(1.0, True), (1e30, True), (np.inf, True), (1.0, False), (1.0, True)]:
        for name, weight in zip(("a", "b"), two.weights, strict=True):
            weights[name == "b"].assign(weight)
        by_apply(tf.constant(factor), tf.constant(when))
        two.step(tf.constant(factor), tf.constant(when))
        assert two.counts() == [int(count) for count in alone.counters]
        assert raw(two.loss_scaler.state) == raw(alone.state)
        assert int(two.loss_scaler.last_skip.cause) == int(alone.last_skip.cause)


def test_a_schedule_by_attempts_is_read_before_the_step_is_counted():
    schedule = keras.optimizers.schedules.PolynomialDecay(1.0, 4, 0.0)
    two = Two("eager", lambda: SGD(0.1))
    two.optimizers[0] = SGD(loops.ByAttempts(schedule, two.loss_scaler))
    rates = []
    for factor in (1.0, np.inf, 1.0, 1.0):
        before = two.weights[0].numpy()
        two.step(tf.constant(factor), tf.constant(True))
        rates.append((before - two.weights[0].numpy())[0])
    np.testing.assert_allclose(rates, [1.0, 0.0, 0.5, 0.25])


def test_a_composed_step_that_cannot_move_is_stuck():
    models = [keras.Sequential([keras.Input([2]), keras.layers.Dense(1, use_bias=False)]) for _ in range(2)]
    parts = [
        loops.Part("a", models[0], lambda found: found[0], SGD(0.1)),
        loops.Part("b", models[1], lambda found: found[1], SGD(float("nan"))),
    ]
    shared = scaler.LossScaler(scaler.Dynamic(8.0), stuck=scaler.StuckPolicy(consecutive_skips=2))
    step = loops.ComposedStep(parts, lambda x: [tf.reduce_mean(model(x) ** 2) for model in models], loss_scaler=shared)
    before = raw([*models[0].weights, *models[1].weights])
    for _ in range(2):
        step(tf.ones([4, 2]))
    with pytest.raises(scaler.StuckError, match="learning rate"):
        shared.check()
    assert raw([*models[0].weights, *models[1].weights]) == before
    assert int(shared.counters.applied) == 0


def share(**changed):
    return scaler.Share(SGD(0.1), [tf.constant([1.0])], [tf.Variable([1.0])])._replace(**changed)


def test_what_cannot_be_a_step_of_several_is_refused(snapshot):
    loss_scaler, own, half = scaler.LossScaler(scaler.Static(1.0)), share(), tf.Variable(tf.cast([1.0], tf.float16))
    masters = [share(grads=[tf.cast([1.0], tf.float16)], variables=scaler.MasterWeights([half])) for _ in range(2)]
    given = {
        "no share": (loss_scaler, []),
        "a bare share": (loss_scaler, own),
        "a number": (loss_scaler, 5),
        "a tuple in the place of a share": (loss_scaler, [tuple(own)]),
        "a variable twice": (loss_scaler, [own, own._replace(optimizer=SGD(0.1))]),
        "an optimizer twice": (loss_scaler, [own, share(optimizer=own.optimizer)]),
        "two masters of one weight": (loss_scaler, masters),
        "a guard that clips": (
            scaler.LossScaler(scaler.SpikeGuard(scaler.Static(1.0), by_tensor="clip")),
            [own, share()],
        ),
        "a list of scalers": ([scaler.LossScaler(scaler.Static(1.0))], [own]),
    }
    assert {name: said(lambda one=one: scaler.apply_together(*one)) for name, one in given.items()} == snapshot
    assert own.variables[0].numpy() == [1.0]


class Breaks(SGD):
    """Ends in an error of its own."""

    def update_step(self, gradient, variable, learning_rate):
        raise OSError("no such table")


@pytest.mark.parametrize(
    "second",
    [
        {"grads": [None]},
        {"grads": []},
        {"grads": tf.constant([1.0])},
        {"optimizer": "adam"},
        {"clip_norm": -1.0},
        {"variables": 3},
        {"optimizer": Breaks(0.1)},
        {"variables": [tf.Variable([1.0], dtype="float16")]},
    ],
    ids=["None", "no gradients", "a tensor", "a name", "a limit", "no variables", "an error of its own", "16 bits"],
)
def test_an_error_of_one_leaves_nothing_moved(second, snapshot):
    loss_scaler, weights = scaler.LossScaler(scaler.Static(1.0)), [tf.Variable([1.0]), tf.Variable([2.0])]
    first = scaler.Share(keras.optimizers.Adam(0.1), (tf.constant([one]) for one in [1.0]), iter(weights[:1]))
    other = share(variables=weights[1:])._replace(**second)
    kind = OSError if isinstance(other.optimizer, Breaks) else scaler.InvalidArgument
    assert said(lambda: scaler.apply_together(loss_scaler, iter([first, other])), kind) == snapshot
    assert raw([*weights, first.optimizer.iterations]) == raw([tf.constant([1.0]), tf.constant([2.0]), np.int64(0)])
    assert int(loss_scaler.counters.attempted) == 0


@pytest.mark.parametrize("by_tensor", [None, "skip"])
def test_a_spike_of_one_optimizers_gradients_moves_none(by_tensor):
    guard = scaler.SpikeGuard(scaler.Static(1.0), window=3, loss=False, by_tensor=by_tensor)
    loss_scaler, weights = scaler.LossScaler(guard), [tf.Variable([1.0], name=name) for name in "ab"]
    optimizers = [SGD(0.1) for _ in weights]

    def step(second):
        scaled = loss_scaler.scale(tf.constant(1.0))
        grads = [tf.reshape(scaled, [1]), tf.reshape(second * scaled, [1])]
        shares = [
            scaler.Share(*one)
            for one in zip(optimizers, [grads[:1], grads[1:]], [weights[:1], weights[1:]], strict=True)
        ]
        return scaler.apply_together(loss_scaler, shares)[0]

    for _ in range(3):
        assert step(tf.constant(1.0)).finite
    before = raw(weights)
    outcome = step(tf.constant(1e6))
    assert (int(outcome.cause), raw(weights)) == (scaler.Cause.SPIKE, before)
    assert "'b" in loss_scaler.explain(outcome)


def test_a_function_may_have_several_shares():
    weights = [tf.Variable([1.0]), tf.Variable([2.0])]
    shares = [share(optimizer=plain_descent, variables=[weight]) for weight in weights]
    scaler.apply_together(scaler.LossScaler(scaler.Static(1.0)), shares)
    assert [float(weight[0]) for weight in weights] == [0.0, 1.0]


@pytest.mark.parametrize("update", [True, np.True_, 1])
def test_whatever_is_true_counts_a_step(update):
    loss_scaler = scaler.LossScaler(scaler.Static(1.0))
    loss_scaler.apply(SGD(0.1), [tf.constant([1.0])], [tf.Variable([1.0])], update=update)
    assert int(loss_scaler.counters.applied) == 1


class Many:
    """Weights with an optimizer each, of which any may be given a learning rate of NaN."""

    def __init__(self, size, mode, select):
        self.weights = [tf.Variable([1.0], name=name) for name in "abc"[:size]]
        self.optimizers = [SGD(0.1) for _ in self.weights]
        self.loss_scaler = scaler.LossScaler(scaler.Dynamic(8.0), select=select)
        for optimizer, weight in zip(self.optimizers, self.weights, strict=True):
            optimizer.build([weight])
        self.step = self._step if mode == "eager" else tf.function(self._step, jit_compile=mode == "xla")

    def _step(self, factor):
        with tf.GradientTape() as tape:
            scaled = self.loss_scaler.scale(factor * tf.add_n([tf.reduce_sum(weight) for weight in self.weights]))
        grads = tape.gradient(scaled, self.weights)
        shares = [
            scaler.Share(optimizer, [grad], [weight], clip_norm=0.5)
            for optimizer, grad, weight in zip(self.optimizers, grads, self.weights, strict=True)
        ]
        return scaler.apply_together(self.loss_scaler, shares)

    def bits(self):
        return raw([*self.weights, *(one.iterations for one in self.optimizers)])

    def spoil(self, spoilt):
        for place, optimizer in enumerate(self.optimizers):
            optimizer.learning_rate.assign(float("nan") if place == spoilt else 0.1)


many = functools.cache(Many)
"""The same each time, traced once."""


@pytest.mark.parametrize(("size", "mode", "select"), [(3, "eager", None), (3, "graph", None), (3, "graph", True)])
def test_whichever_cannot_move_none_has(size, mode, select):
    steps = many(size, mode, select)
    for spoilt in range(size):
        steps.spoil(spoilt)
        before, counts = steps.bits(), np.int64(steps.loss_scaler.counters)
        outcome, each = steps.step(tf.constant(1.0))
        assert steps.bits() == before
        assert not any(map(bool, [outcome.finite, *(one.finite for one in each)]))
        assert (np.int64(steps.loss_scaler.counters) - counts).tolist() == [1, 0, 1, 1]
        assert int(outcome.cause) == scaler.Cause.UPDATE


def test_the_clipped_norm_is_that_of_what_all_optimizers_were_given():
    steps = many(3, "graph", None)
    steps.spoil(None)
    outcome, each = steps.step(tf.constant(1.0))
    assert [float(one.clipped_norm) for one in each] == [0.5] * 3
    np.testing.assert_allclose([outcome.grad_norm, outcome.clipped_norm], [3**0.5, 0.75**0.5], rtol=1e-6)
    assert np.isnan(steps.step(tf.constant(float("inf")))[0].clipped_norm)


@pytest.mark.parametrize("clip", [{"clip_norm": 1.0}, {"clip": scaler.ClipByNorm(1.0)}], ids=["global", "each"])
@pytest.mark.parametrize("norms", [(5.0, 20.0), (20.0, 0.5)])
def test_each_optimizer_moves_by_gradients_clipped_to_the_norm_of_its_own(norms, clip):
    loss_scaler, weights = scaler.LossScaler(scaler.Static(1.0)), [tf.Variable([0.0, 0.0]) for _ in norms]
    directions = [norm * tf.constant([0.6, 0.8]) for norm in norms]
    shares = [scaler.Share(SGD(1.0), [one], [own], **clip) for one, own in zip(directions, weights, strict=True)]
    _, each = scaler.apply_together(loss_scaler, shares)
    moved = [np.linalg.norm(weight) for weight in weights]
    np.testing.assert_allclose(moved, np.minimum(norms, 1.0), rtol=1e-6)
    np.testing.assert_allclose(moved, [one.clipped_norm for one in each], rtol=1e-6)


@pytest.mark.parametrize("spoilt", [0, 1])
def test_positions_count_over_the_variables_of_all(spoilt):
    weights = [tf.Variable([1.0], name=name) for name in "abcd"]
    optimizers = [Spoiled([1]) if at == spoilt else SGD(0.1) for at in range(2)]
    loss_scaler = scaler.LossScaler(scaler.Static(1.0))
    grads = [tf.constant([1.0])] * 2
    shares = [scaler.Share(one, grads, weights[2 * at : 2 * at + 2]) for at, one in enumerate(optimizers)]
    outcome, _ = scaler.apply_together(loss_scaler, shares)
    assert int(outcome.variable) == 2 * spoilt
    assert f"'{'ac'[spoilt]}" in loss_scaler.explain(outcome)


@pytest.mark.parametrize("several", [False, True])
def test_a_limit_that_is_drawn_from_bad_data_hides_no_bad_loss(several):
    """Bad data costs a batch, and never the scale."""
    loss_scaler, weights = scaler.LossScaler(scaler.Dynamic(8.0)), [tf.Variable([1.0]), tf.Variable([1.0])]
    optimizers, data = [SGD(0.1), SGD(0.1)], tf.constant([float("nan")])
    with tf.GradientTape() as tape:
        scaled = loss_scaler.scale(tf.reduce_sum(tf.add_n(weights) * data))
    grads, limit = tape.gradient(scaled, weights), tf.norm(data)
    if several:
        shares = [scaler.Share(optimizers[0], grads[:1], weights[:1])]
        shares.append(scaler.Share(optimizers[1], grads[1:], weights[1:], clip_norm=limit))
        outcome, _ = scaler.apply_together(loss_scaler, shares)
    else:
        outcome = loss_scaler.apply(optimizers[0], grads, weights, clip_norm=limit)
    assert (int(outcome.cause), float(loss_scaler.loss_scale)) == (scaler.Cause.LOSS, 8.0)


NAN = float("nan")


@pytest.mark.parametrize(
    ("first", "rates", "limits", "index", "said"),
    [
        (
            keras.optimizers.Adagrad,
            (1e38, NAN),
            (None, None),
            0,
            "Adagrad turned finite gradients into an infinity, first in 'a",
        ),
        (keras.optimizers.Adagrad, (0.1, NAN), (None, None), -3, "the learning rate of Adamax is NaN"),
        (SGD, (NAN, 0.1), (None, NAN), -1, "the learning rate of SGD is NaN"),
        (SGD, (0.1, 0.1), (None, NAN), -4, "the limit of the clipping for Adamax is not a positive finite number"),
    ],
    ids=["an infinity before a rate", "the second rate", "a rate before a limit", "the second limit"],
)
def test_the_first_optimizer_that_fails_is_named(first, rates, limits, index, said):
    """Of those whose fault is known before any moves, or else of those that were tried."""
    optimizers = [first(rates[0]), keras.optimizers.Adamax(rates[1], epsilon=1e-30)]
    weights = [tf.Variable([1.0], name=name) for name in "ab"]
    loss_scaler, grads = scaler.LossScaler(scaler.Static(1.0)), [tf.constant([1e5])]
    shares = [
        scaler.Share(optimizer, grads, [weight], clip_norm=None if limit is None else tf.constant(limit))
        for optimizer, weight, limit in zip(optimizers, weights, limits, strict=True)
    ]
    before = raw(weights)
    outcome, _ = scaler.apply_together(loss_scaler, shares)
    assert (int(outcome.cause), int(outcome.index), raw(weights)) == (scaler.Cause.UPDATE, index, before)
    assert said in loss_scaler.explain(outcome)
    assert int(outcome.variable) == index


def test_a_refused_call_leaves_the_scaler_as_it_was():
    guard = scaler.SpikeGuard(scaler.Static(1.0), window=5, loss=False, by_tensor="clip")
    loss_scaler, weights = scaler.LossScaler(guard), [tf.Variable([1.0], name=name) for name in "abc"]
    grads = [tf.constant([1.0])]
    with pytest.raises(scaler.InvalidArgument, match="it limits the gradients of one optimizer, and here are 2"):
        scaler.apply_together(loss_scaler, [scaler.Share(SGD(0.1), grads, [weight]) for weight in weights[:2]])
    assert loss_scaler.apply(SGD(0.1), grads * 3, weights).finite


def test_two_splits_of_one_list_of_variables_have_names_of_their_own():
    loss_scaler, weights = scaler.LossScaler(scaler.Static(1.0)), [tf.Variable([1.0], name=name) for name in "abc"]
    offsets = []
    for split in (1, 2):
        optimizers = [SGD(0.1, momentum=0.9), Spoiled([])]
        parts = weights[:split], weights[split:]
        shares = [
            scaler.Share(optimizer, [tf.constant([1.0])] * len(own), own)
            for optimizer, own in zip(optimizers, parts, strict=True)
        ]
        offsets.append(int(scaler.apply_together(loss_scaler, shares)[0].name_offset))
    assert offsets[0] != offsets[1]


def test_norms_of_float64_gradients_may_be_beyond_the_square_of_float32():
    weights = [tf.Variable([1.0], dtype=tf.float64) for _ in range(2)]
    grads = [tf.constant([1e25], tf.float64)]
    shares = [scaler.Share(SGD(0.1), grads, [weight], clip_norm=1e30) for weight in weights]
    outcome, _ = scaler.apply_together(scaler.LossScaler(scaler.Static(1.0)), shares)
    np.testing.assert_allclose([outcome.grad_norm, outcome.clipped_norm], [2**0.5 * 1e25] * 2, rtol=1e-6)


def test_masters_may_hold_float32_variables():
    weights = [tf.Variable([1.0]), tf.Variable(tf.cast([1.0], tf.float16)), tf.Variable([1.0])]
    shares = [
        scaler.Share(SGD(0.5), [tf.constant([1.0]), tf.cast([1.0], tf.float16)], scaler.MasterWeights(weights[:2])),
        scaler.Share(SGD(0.5), [tf.constant([1.0])], scaler.MasterWeights(weights[2:])),
    ]
    outcome, _ = scaler.apply_together(scaler.LossScaler(scaler.Static(1.0)), shares)
    assert outcome.finite
    assert [float(weight[0]) for weight in weights] == [0.5] * 3
