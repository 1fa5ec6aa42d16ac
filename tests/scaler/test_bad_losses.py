"""Guards that bad data costs a batch and never the scale: a skip whose loss is not finite leaves the strategy alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored, one_for_each
from scaler_cases import modes, modes_with, steep
from strategies import reference

import scaler
from scaler import Cause, Dynamic, Event, LossScaler, presets
from scaler.strategies import Bounded, RisingFloor, Scheduled, Warmup
from scaler.strategies.base import sees_every_step

CLEAN, OVERFLOW, NAN, INFINITE, UNSEEN = LETTERS = "1oniu"
"""A step that is applied; that overflows with a finite loss; with a loss that is NaN or infinite; applied with such."""
SLOPE = {CLEAN: 1.0, OVERFLOW: 2.0**126, NAN: np.nan, INFINITE: 2.0**126, UNSEEN: 1.0}
ADDED = {INFINITE: np.inf, UNSEEN: np.inf}
WORD = "11n1oi1n111uoonni1oon11nnn1oooooonnnnnn11111i1o1u"
RULE = {"initial_scale": 2.0**10, "growth_interval": 3, "hysteresis": 2, "min_scale": 2.0**6, "max_scale": 2.0**12}
BAD = Event(tf.constant(False))


def step_of(letter):
    return tf.constant(SLOPE[letter]), tf.constant(ADDED.get(letter, 0.0))


class Step:
    """One weight at 0, so that the loss is what is added to it, and the slope alone overflows; ways to end a step."""

    def __init__(self, strategy=None, optimizer=scaler.move_nothing, **options):
        self.weights, self.optimizer = [tf.Variable([0.0])], optimizer
        self.loss_scaler = LossScaler(Dynamic(**RULE) if strategy is None else strategy, **options)

    def gradients(self, slope, added):
        with tf.GradientTape(persistent=True) as tape:
            # At a weight of 0 a NaN slope makes the loss NaN, and a large one leaves it 0.
            scaled = self.loss_scaler.scale(tf.reduce_sum(self.weights[0] * slope) + added)
        self.again = lambda small: tape.gradient(scaled, self.weights, output_gradients=small)
        return tape.gradient(scaled, self.weights)

    def apply(self, slope, added):
        return self.loss_scaler.apply(self.optimizer, self.gradients(slope, added), self.weights).finite

    def judged(self, slope, added):
        grads = self.gradients(slope, added)
        finite = self.loss_scaler.apply(self.optimizer, grads, self.weights, update=False).finite
        self.loss_scaler.update(Event(finite))
        return finite

    def long_form(self, slope, added):
        finite = scaler.all_finite(self.loss_scaler.unscale(self.gradients(slope, added)))
        self.loss_scaler.update(Event(finite))
        return finite

    def together(self, slope, added):
        share = scaler.Share(self.optimizer, self.gradients(slope, added), self.weights)
        return scaler.apply_together(self.loss_scaler, [share])[0].finite


def follows_the_reference(take, loss_scaler, word=WORD, bad=NAN + INFINITE):
    """Takes the steps of a word one by one, and compares scale, state and counters with the reference after each."""
    finite = reference.word("".join("01"[one in (CLEAN, UNSEEN)] for one in word))
    expected = reference.dynamic(finite, **RULE, bad=reference.bad(word, bad))
    for step, letter in enumerate(word):
        assert bool(take(*step_of(letter))) == bool(finite[step, 0])
        found = [float(one) for one in loss_scaler.state]
        assert found == [float(one[step, 0]) for one in expected], f"after {word[: step + 1]}"
    counters, applied = loss_scaler.counters, sum(letter in "1u" for letter in word)
    assert (int(counters.attempted), int(counters.applied)) == (len(word), applied)
    assert int(counters.consecutive_skips) == len(word) - 1 - max(map(word.rfind, "1u"))


@modes_with(["steps"], eager=[[24]], graph=[[49]])
def test_a_scaler_is_the_reference(execute, steps):
    made = Step()
    follows_the_reference(execute(made.apply), made.loss_scaler, WORD[:steps])


@modes_with(["way"], eager=[["together"]], graph=[["judged"], ["long_form"]])
def test_so_is_every_way_to_end_a_step(execute, way):
    made = Step()
    follows_the_reference(execute(getattr(made, way)), made.loss_scaler, WORD[:18])


@modes("loop")
def test_steps_that_select_are_the_reference(execute):
    made = Step(optimizer=keras.optimizers.SGD(0.0), select=True)
    follows_the_reference(execute(made.apply), made.loss_scaler)


def test_a_strategy_that_sees_every_step_backs_off():
    made = Step(Dynamic(**RULE, sees_every_step=True))
    follows_the_reference(made.apply, made.loss_scaler, WORD[:18], bad="")


def test_a_loss_that_is_not_known_counts_as_finite():
    made = Step(Dynamic(8.0))
    made.loss_scaler.update(BAD)
    assert float(made.loss_scaler.loss_scale) == 4.0
    # That of an earlier step is not that of this one.
    made.long_form(*step_of(NAN))
    with pytest.warns(scaler.ScaleWarning, match="nothing was scaled since"):
        made.loss_scaler.update(BAD)
    assert float(made.loss_scaler.loss_scale) == 2.0


def test_a_loss_of_an_earlier_part_of_the_step_counts():
    """Two losses of one step, each judged before the next is scaled, and one count."""
    made = Step(Dynamic(8.0))
    for first, second, scale in ((NAN, CLEAN, 8.0), (CLEAN, NAN, 8.0), (OVERFLOW, CLEAN, 4.0), (CLEAN, CLEAN, 4.0)):
        losses = (made.gradients(*step_of(letter)) for letter in (first, second))
        finite = [made.loss_scaler.apply(made.optimizer, one, made.weights, update=False).finite for one in losses]
        made.loss_scaler.update(Event(tf.reduce_all(finite)))
        assert float(made.loss_scaler.loss_scale) == scale


@pytest.mark.parametrize("replicas", [1, 2])
def test_no_group_of_layers_moves_at_a_skip_of_the_loss(replicas):
    """An infinity added to a loss leaves what enters the groups finite, also beside a replica that overflows."""
    devices = mirrored(replicas)
    with devices.scope():
        head, body = (tf.Variable([1.0], name=name) for name in ("head", "body"))
        layerwise = scaler.layerwise.Layerwise({"head": [head], "body": [body]}, strategy=Dynamic(8.0))

    def take(gain, added):
        with tf.GradientTape() as tape:
            inside = steep(layerwise.rescale(body + 0.0, "body"), gain)
            loss = tf.reduce_sum(layerwise.rescale(head * inside, "head")) + added
        layerwise.update(layerwise.gradient(tape, loss, [head, body])[1])

    def call(gains, added):
        devices.run(take, (gains, added))

    call = tf.function(call) if replicas > 1 else call

    def scales(gain, added):
        """The first replica overflows, and the last one has the loss."""
        gains, each = tf.constant([gain, 1.0]), tf.constant([added if replicas == 1 else 0.0, added])
        call(one_for_each(devices, gains), one_for_each(devices, each))
        return layerwise.scales.numpy().tolist()

    assert scales(1.0, 0.0) == [8.0, 8.0]
    assert scales(1e38, np.inf) == [8.0, 8.0]
    assert scales(1e38, 0.0) == [4.0, 8.0]


@pytest.mark.parametrize("way", ["apply", "long_form"])
def test_the_loss_of_any_replica_counts_for_all(way):
    """A loss that is NaN on one replica and an overflow on the other is bad data."""
    devices = mirrored(2)
    with devices.scope():
        made = Step(Dynamic(8.0))

    @tf.function
    def call(*each):
        return devices.run(getattr(made, way), each)

    for letters, scale in ((NAN + CLEAN, 8.0), (CLEAN + NAN, 8.0), (NAN + OVERFLOW, 8.0), (OVERFLOW + CLEAN, 4.0)):
        call(*(one_for_each(devices, part) for part in zip(*map(step_of, letters), strict=True)))
        assert float(made.loss_scaler.loss_scale) == scale, letters
    assert int(made.loss_scaler.counters.skipped) == 4


def test_a_retry_of_a_finite_loss_stays():
    """Of a window's two micro-batches the first is retried, and the second is bad data."""
    made = Step(scaler.SpikeGuard(Dynamic(2.0**4), window=3))

    def micro_batch(slope, added, ends):
        grads, loss_scale, _ = made.loss_scaler.retry(made.gradients(slope, added), lambda small: made.again(small))
        return made.loss_scaler.apply(made.optimizer, grads, made.weights, when=ends, loss_scale=loss_scale).cause

    micro_batch(tf.constant(2.0**125), tf.constant(0.0), tf.constant(False))
    assert float(made.loss_scaler.loss_scale) == 4.0
    assert made.loss_scaler._before_retries["loss_scale"].numpy() > 0.0
    assert int(micro_batch(*step_of(NAN), tf.constant(True))) == Cause.LOSS
    assert float(made.loss_scaler.loss_scale) == 4.0
    assert made.loss_scaler._before_retries["loss_scale"].numpy() == 0.0


@pytest.mark.parametrize(("accumulate", "protect"), [(None, False), (2, True)])
def test_fit_keeps_its_scale(accumulate, protect):
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, kernel_initializer="zeros")])
    model = scaler.protect(model) if protect else model
    inner = keras.optimizers.SGD(0.0, gradient_accumulation_steps=accumulate)
    optimizer = scaler.LossScaleOptimizer(inner, Dynamic(2.0**40))
    model.compile(optimizer, lambda y, prediction: tf.reduce_mean((y - prediction) * 2.0**100), run_eagerly=True)
    # Every loss but a NaN is finite, and every gradient overflows: in all but the last window there is a NaN.
    targets = np.float32([np.nan, 1.0, 1.0, np.nan, 1.0, 1.0])
    scales = []
    sees = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: scales.append(float(optimizer.loss_scale))
    )
    model.fit(np.ones([6, 1]), targets[:, None], batch_size=1, shuffle=False, verbose=0, callbacks=[sees])
    assert np.log2(scales).tolist() == ([40] * 5 + [39] if accumulate else [40, 39, 38, 38, 37, 36])


WRAPPED = [
    lambda strategy: Warmup(strategy, 5),
    lambda strategy: Bounded(strategy, 1.0, 2.0**20),
    lambda strategy: RisingFloor(strategy, {2: 4.0}),
    scaler.SpikeGuard,
    lambda strategy: Scheduled({0: strategy, 3: strategy}),
]


@pytest.mark.parametrize("wrap", WRAPPED)
def test_a_strategy_around_another_does_as_that_one_says(wrap):
    for given, sees in ((Dynamic(), False), (presets.keras(), True), (presets.pytorch(), True)):
        wrapped = wrap(given)
        assert sees_every_step(wrapped) == sees
        config = scaler.keras.arguments.to_config(wrapped)
        assert sees_every_step(scaler.keras.arguments.from_config(config)) == sees
    assert not sees_every_step(Scheduled({0: presets.keras(), 3: Dynamic()}))


def test_the_state_of_a_strategy_around_another_stays_as_a_whole():
    inside = Warmup(RisingFloor(Bounded(Dynamic(8.0, growth_interval=1), 1.0, 64.0), {4: 16.0}), 9)
    made = Step(scaler.SpikeGuard(Scheduled({0: inside, 3: scaler.Headroom()}), window=4))
    for letter in "1n1oi":
        before = [one.numpy().tolist() for one in made.loss_scaler.state]
        made.apply(*step_of(letter))
        after = [one.numpy().tolist() for one in made.loss_scaler.state]
        assert (after == before) == (letter in "ni"), letter


def test_every_preset_sees_every_step():
    """As its original does, which knows no loss."""
    needs = {"tf_contrib": {"initial_scale": 8.0, "growth_interval": 5}}
    for name in presets.__all__:
        made = None if name.endswith("_stuck") else getattr(presets, name)(**needs.get(name, {}))
        assert made is None or made == scaler.NoScaling() or sees_every_step(made), name


def test_a_strategy_of_ones_own_is_not_shown_them():
    class Halved(Dynamic):
        pass

    made = Step(Halved(8.0))
    made.apply(*step_of(NAN))
    made.apply(*step_of(OVERFLOW))
    assert float(made.loss_scaler.loss_scale) == 4.0


def test_a_penalty_that_divides_by_the_scale_of_gradients_is_no_bad_data():
    loss_scaler, optimizer = scaler.LossScaler(scaler.Dynamic(2.0**120, max_scale=2.0**126)), keras.optimizers.SGD(0.0)
    weight = tf.Variable([2.0**10])

    def step():
        x = tf.ones([1])
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                scaled = loss_scaler.scale(tf.reduce_sum(weight * x))
            slope = inner.gradient(scaled, x) / loss_scaler.scale_of_gradients
            penalty = loss_scaler.scale(tf.reduce_sum(slope**2))
        return loss_scaler.apply(optimizer, [outer.gradient(penalty, weight)], [weight]).finite

    assert not step()
    assert float(loss_scaler.loss_scale) == 2.0**119
