"""Guards the effects: each runs and shows its direction at a small size, and what they stand on is right."""

import numpy as np
import pytest
import tensorflow as tf

import scaler
from benchmarks.effects import EXPERIMENTS, choose, measure, networks, unit_scaling
from benchmarks.effects.collapse_runs import EVERY, SavedRun
from benchmarks.effects.effect import told
from benchmarks.effects.lag import Lagging, _skipped
from benchmarks.effects.log_normal import LAWS, NORMAL_SPREAD, fits_of
from benchmarks.effects.look_ahead import interval

# Steps, and which claims hold in so few of them, by number.
SMALL = {
    "underflow": (20, [0, 1, 3, 5]),
    "log-normal": (40, []),
    "static-scale": (120, [0, 1, 2]),
    "sixteen-bit-weights": (60, [0, 1, 2, 3]),
    "stochastic-rounding": (60, [0, 3, 4]),
    "chunked-sums": (20, [0, 1, 5]),
    "second-graph": (10, [0, 8]),
    "skip-rate": (150, [0]),
    "look-ahead": (60, [1, 2, 3]),
    "updated-scale": (60, [0, 1, 2, 3]),
    "layerwise": (10, [2, 4]),
    "float8": (60, [0, 2, 3, 4]),
    "narrow-parity": (20, [18]),
    "scale-collapse": (200, [2, 7, 8, 9, 11]),
    "attention-logits": (20, [0, 4, 7, 8]),
    "output-logits": (1000, [0, 4]),
    "spikes": (75, [0, 7, 11]),
    "flushed-part": (100, [3]),
    "lag": (30, [0, 1, 2]),
    "unit-scaling": (20, [0, 3, 4, 6]),
}


@pytest.mark.slow_with("lag", "spikes")
@pytest.mark.exhaustive_with(*SMALL.keys() - {"lag", "spikes"})
@pytest.mark.parametrize("name", SMALL)
def test_an_effect_shows_its_direction(name):
    steps, held = SMALL[name]
    effect = measure(choose(name), 2, steps)
    assert (effect.name, effect.seeds, effect.steps) == (name, 2, steps)
    assert {len(row) for row in effect.rows} == {len(effect.columns)}
    assert effect.beside
    assert {len(values) for values in effect.measured.values()} == {2}
    assert [number for number in held if not effect.claims[number].holds] == []


def test_every_effect_is_tried():
    assert {preset.name for preset in EXPERIMENTS} == set(SMALL)


@pytest.mark.parametrize(("seeds", "steps"), [(0, 20), (1, 9), (1, 2.5), (True, 20)])
def test_what_is_no_number_of_seeds_or_steps_is_refused(seeds, steps):
    with pytest.raises(scaler.InvalidArgument, match="expected an integer of at least"):
        measure(choose("lag"), seeds, steps)


def test_the_backward_pass_is_that_of_a_tape():
    weights = networks.start(2)
    images = tf.random.stateless_uniform([2, 8, 64], [0, 1])
    labels = tf.random.stateless_uniform([2, 8], [0, 2], 0, 10, tf.int32)
    seen = networks.backward(weights, images, labels, tf.constant([4.0, 1.0]), networks.exact, networks.exact)
    with tf.GradientTape() as tape:
        tape.watch(weights)
        given = images
        for number, (kernel, bias) in enumerate(zip(weights[0::2], weights[1::2], strict=True)):
            given = (tf.nn.relu(given) if number else given) @ kernel + bias
        losses = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, given), axis=1)
        total = tf.reduce_sum(losses * [4.0, 1.0])
    np.testing.assert_allclose(seen.loss, losses, rtol=1e-6)
    for own, exact in zip(seen.grads, tape.gradient(total, weights), strict=True):
        np.testing.assert_allclose(own, exact, rtol=1e-4, atol=1e-6)


def test_float16_is_what_the_backward_pass_rounds_to():
    values = tf.constant([1.0, 2.0**-24, 2.0**-25, 2.0**-13 + 2.0**-25, 65504.0, 65520.0])
    expected = [1.0, 2.0**-24, 0.0, 2.0**-13, 65504.0, np.inf]
    assert networks.half(values).numpy().tolist() == expected


def test_an_infinity_skips_one_copy_and_leaves_the_others():
    weights, momenta = [tf.ones([2, 1, 1])], [tf.zeros([2, 1, 1])]
    grads = [tf.constant([[[4.0]], [[np.inf]]])]
    moved, kept = networks.descend(weights, momenta, grads, tf.constant([2.0, 2.0]), networks.all_finite(grads))
    assert kept[0].numpy().ravel().tolist() == [2.0, 0.0]
    np.testing.assert_allclose(moved[0].numpy().ravel(), [1 - networks.RATE * 2, 1])


def test_the_largest_magnitude_of_each_copy():
    tensors = [tf.constant([[[1.0, -3.0]], [[np.nan, 1.0]]]), tf.constant([[[2.0]], [[5.0]]])]
    assert networks.largest(tensors).numpy().tolist() == [3.0, np.inf]


def test_copies_are_counted_as_one_alone_is():
    grads = [tf.constant([[[1.0, -40.0]], [[np.inf, 0.5]]]), tf.constant([[[8.0]], [[9.0]]])]
    counts = networks._histogram(grads, (2.0, 8.0))
    for copy in range(2):
        alone = scaler.gradients.histogram([grad[copy] for grad in grads], (2.0, 8.0))
        assert counts[:, copy].numpy().tolist() == alone.numpy().tolist()


def test_wilsons_interval():
    low, high = interval(np.array([True] * 10 + [False] * 90))
    assert (round(low, 4), round(high, 4)) == (0.0552, 0.1744)
    assert interval(np.zeros([1000], bool))[0] == 0


def test_a_scale_that_lags_uses_what_it_saw_so_long_ago():
    strategy, scales = Lagging(2, 1), []
    state = strategy.init()
    for amax in (1.0, 4.0, 16.0, 64.0):
        state = strategy.update(state, scaler.Event(tf.constant(True), tf.constant(amax)))
        scales.append(float(state.loss_scale))
    assert scales == [2.0**10, 2.0**14, 2.0**12, 2.0**10]


def test_a_lag_overflows_where_gradients_have_risen():
    trace = np.array([1.0, 1.0, 4.0, 4.0, 1.0])[:, None]
    assert _skipped(trace, 1, 0).tolist() == [1 / 4]
    assert _skipped(trace, 2, 0).tolist() == [2 / 3]
    assert _skipped(trace, 1, 2).tolist() == [0]
    assert np.isnan(_skipped(trace, 5, 0)).all()


@pytest.mark.parametrize("law", LAWS)
def test_values_of_a_law_are_nearest_to_it(law):
    generator = np.random.default_rng(0)
    drawn = {
        "log-normal": 2.0 ** generator.normal(-12, 3, 20_000),
        "normal": generator.normal(0, 1e-3, 20_000),
        "Laplace": generator.laplace(0, 1e-3, 20_000),
    }[law]
    fits = fits_of(scaler.observe.exponents(tf.constant(drawn, tf.float32)).numpy())
    nearest = min(fits, key=lambda fit: fit.distance)
    assert (nearest.law, nearest.distance < 0.02) == (law, True)
    for exponent in (-20, -12, -10.5):
        assert nearest.below(exponent) == pytest.approx((np.abs(drawn) < 2.0**exponent).mean(), abs=0.02)
    if law == "log-normal":
        assert (nearest.centre, nearest.spread) == pytest.approx((-12, 3), abs=0.1)
    if law == "normal":
        assert fits[0].spread == pytest.approx(NORMAL_SPREAD, abs=0.05)


def test_zeros_do_not_enter_a_fit():
    values = 2.0 ** np.random.default_rng(0).normal(-12, 3, 1000)
    one, other = (
        fits_of(scaler.observe.exponents(tf.constant(each, tf.float32)).numpy())
        for each in (values, np.concatenate([values, np.zeros(500)]))
    )
    assert one == other


@pytest.mark.slow
def test_a_run_goes_on_from_its_saves_as_if_it_had_not_stopped():
    made = SavedRun(scaler.Dynamic(2.0**20, growth_interval=7))
    rates = [1e-3, 2e-3, 3e-3]
    whole = made.run(rates, 1)
    assert list(whole.saves) == [0, EVERY, 2 * EVERY]
    assert not whole.applied[0]
    again = made.run(rates[1:], 1, EVERY, whole.saves[EVERY])
    np.testing.assert_array_equal(again.loss, whole.loss[EVERY:])
    np.testing.assert_array_equal(again.scale, whole.scale[EVERY:])
    assert again.accuracy == whole.accuracy
    other = made.run(rates[1:], 1, EVERY, whole.saves[EVERY], batches=1)
    assert (other.loss != whole.loss[EVERY:]).all()


def unit_runs(exponents, losses):
    """Runs of unit scaling with gradients at one exponent of each look, by network, and these losses."""

    def run(kind, loss):
        counts = np.zeros([len(exponents[kind]), scaler.observe.BINS], np.int64)
        for look, exponent in enumerate(exponents[kind]):
            counts[look, scaler.observe.bin_of(exponent)] = 10
            counts[look, scaler.observe.bin_of(-8)] = 30 if kind == "ordinary" else 0
        return unit_scaling.Course(loss, counts, 0.0)

    return {
        key: [run(key[0], loss + 0.01 * seed) for seed in range(2)]
        for key, loss in zip(unit_scaling._WAYS, losses, strict=True)
    }


EXPONENTS = {"ordinary": [-27, -30], "unit-scaled": [-1, -2]}


def test_the_verdicts_on_unit_scaling_are_those_of_the_numbers():
    effect = told(
        "unit-scaling", 2, 10, unit_scaling.found_of(unit_runs(EXPONENTS, [2.0, 2.0, 2.0, 2.5, 2.0, 2.0, 2.0]))
    )
    assert [claim.holds for claim in effect.claims] == [True] * 13
    assert effect.measured["flushed float16 first step ordinary"] == [0.25, 0.25]
    assert effect.measured["flushed float16 first step unit-scaled"] == [0.0, 0.0]
    assert effect.beside[0][2] == "ordinary 2^-7.7; unit-scaled 2^-0.5; a normal law of variance 1 has 2^-0.6"


@pytest.mark.parametrize(
    ("exponents", "losses", "wrong"),
    [
        ({"unit-scaled": [-26, -26]}, None, [0, 1, 2, 3, 4]),
        ({"unit-scaled": [-1, -26]}, None, [2, 4, 5]),
        ({}, [2.0, 2.0, 2.0, 2.5, 2.0, 2.1, 2.0], [6, 7]),
        ({}, [2.0, 2.0, 2.0, 2.9, 2.1, 2.1, 2.1], [7, 8]),
        ({}, [2.0, 2.0, 2.0, 2.5, 2.0, 2.0, 2.6], [9, 10]),
        ({}, [2.0, 2.1, 2.0, 2.5, 2.0, 2.0, 2.0], [11]),
        ({}, [2.0, 2.0, 2.0, 2.005, 2.0, 2.0, 2.0], [12]),
    ],
)
def test_a_verdict_on_unit_scaling_changes_with_its_numbers(exponents, losses, wrong):
    runs = unit_runs({**EXPONENTS, **exponents}, losses or [2.0, 2.0, 2.0, 2.5, 2.0, 2.0, 2.0])
    claims = told("unit-scaling", 2, 10, unit_scaling.found_of(runs)).claims
    assert [number for number, claim in enumerate(claims) if not claim.holds] == wrong
