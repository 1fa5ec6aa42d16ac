"""Guards the effects of high learning rates: what their networks and optimizers compute, and their verdicts."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from loops.study.effects import adam_copies, attention_logits, output_logits, spikes
from loops.study.effects import small_transformer as small
from loops.study.effects.adam_copies import CLIPPED, PLAIN, STABLE, Moments, Setup, stepped


def after(setup, start, grads):
    """The weights after a step for each gradient, in plain NumPy, from the algorithm's description."""
    weight, first, second = (np.zeros_like(start) for _ in range(3))
    weight = start.astype(np.float64)
    for step, grad in enumerate(grads.astype(np.float64), 1):
        if setup.way == CLIPPED:
            grad = grad * min(1.0, adam_copies.CLIP_NORM / np.sqrt((grad**2).sum()))
        first = 0.9 * first + 0.1 * grad
        second = setup.beta_2 * second + (1 - setup.beta_2) * grad**2
        v, u = first / (1 - 0.9**step), second / (1 - setup.beta_2**step)
        rate = setup.rate
        if setup.way == STABLE:
            rate /= max(1.0, np.sqrt((grad**2 / np.maximum(u, setup.epsilon**2)).mean()))
        weight = weight * (1 - setup.rate * adam_copies.DECAY) - rate * v / (np.sqrt(u) + setup.epsilon)
    return weight


def test_each_copy_has_the_optimizer_of_its_setup():
    setups = [Setup(0.1, 0.9), Setup(0.1, 0.999, 1e-2), Setup(0.2, 0.99, way=CLIPPED), Setup(0.1, 0.999, way=STABLE)]
    generator = np.random.default_rng(0)
    start = generator.normal(size=(4, 3, 2)).astype(np.float32)
    grads = generator.normal(size=(6, 4, 3, 2)).astype(np.float32)
    grads[3:] *= 30
    each = Setup(*map(np.array, zip(*setups, strict=True)))
    weights, moments = [tf.constant(start)], [Moments(tf.zeros_like(start), tf.zeros_like(start))]
    ratios = []
    for step, grad in enumerate(grads, 1):
        weights, moments, ratio, _ = stepped(weights, moments, [tf.constant(grad)], tf.constant(float(step)), each)
        ratios.append(ratio[0].numpy())
    for number, setup in enumerate(setups):
        expected = after(setup, start[number], grads[:, number])
        np.testing.assert_allclose(weights[0][number], expected, rtol=2e-3, atol=1e-4)
    assert np.allclose(ratios[0], [1, 1, 1, 1], atol=0.1)
    assert ratios[3][3] > 1.5


def test_the_plain_way_is_adamw():
    start = np.random.default_rng(1).normal(size=(1, 3, 2)).astype(np.float32)
    variable = tf.Variable(start[0])
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=adam_copies.DECAY, beta_2=0.99, epsilon=1e-8)
    weights, moments = [tf.constant(start)], [Moments(tf.zeros_like(start), tf.zeros_like(start))]
    each = Setup(np.array([0.05]), np.array([0.99]), np.array([1e-8]), np.array([PLAIN]))
    for step in range(1, 5):
        grad = tf.sin(weights[0] * step)
        optimizer.apply([grad[0]], [variable])
        weights, moments, _, _ = stepped(weights, moments, [grad], tf.constant(float(step)), each)
    np.testing.assert_allclose(weights[0][0], variable, rtol=1e-4, atol=1e-5)


def test_the_rate_rises_and_falls():
    shares = [float(small.share_of_rate(tf.constant(step), 100)) for step in range(100)]
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert shares[-1] == pytest.approx(0, abs=1e-6)
    assert all(a > b for a, b in itertools.pairwise(shares[4:]))


def test_a_sensitivity_counts_what_diverged_as_nothing_learned():
    ends = np.array([[2.0, 3.0], [1.0, 2.0], [np.nan, 9.0]])
    assert small.sensitivity(ends, np.array([4.0, 5.0])) == pytest.approx([7 / 3 - 1, 10 / 3 - 2])


def test_queries_and_keys_are_normalized_in_each_head():
    keras.utils.set_random_seed(0)
    layer = small.NormalizedAttention(2, 4, flash_attention=False)
    x = tf.random.stateless_normal([3, 5, 8], [0, 0]) * 100
    layer(x, x, use_causal_mask=True)
    assert [weight.path.split("/")[-2] for weight in layer.trainable_weights].count("query_norm") == 1
    layer.query_norm.gamma.assign([2.0, 1.0, 1.0, 1.0])
    found = layer.query_dense(x)
    plain = tf.einsum("abc,cde->abde", x, layer.query_dense.kernel) + layer.query_dense.bias
    centred = plain - tf.reduce_mean(plain, axis=-1, keepdims=True)
    expected = centred / tf.math.reduce_std(plain, axis=-1, keepdims=True) * [2.0, 1.0, 1.0, 1.0]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def course(logit, end, entropy=1.0, log_z=0.0, rounded=None, steps=20):
    logits = np.tile([logit, logit / 2], [steps, 1])
    drift = np.linspace(0, 1, steps) ** 3 * log_z
    return small.Course(logits, np.full([steps, 2], entropy), drift, 4.6, end, end if rounded is None else rounded)


def test_the_verdicts_about_attention_are_of_the_numbers():
    count = len(small.RATES)
    grown = [[course(10.0 * 10**at, 2.0 if at < 3 else 4.0, 1.5 if at < 3 else 0.1)] * 2 for at in range(count)]
    held = [[course(5.0, 2.0)] * 2] * count
    plain, normal = attention_logits._WAYS
    effect = attention_logits.effect_of({plain: grown, normal: held}, 3.0, 2, 20)
    assert [claim.holds for claim in effect.claims] == [True] * 8
    assert effect.beside[0][2] == "4 of 4"
    effect = attention_logits.effect_of({plain: held, normal: grown}, 3.0, 2, 20)
    assert [claim.holds for claim in effect.claims] == [False, True, False, False, False, False, False, True]


def test_the_verdicts_about_outputs_are_of_the_numbers():
    count = len(small.RATES)
    gone = [[course(1.0, 2.0 + at / 10, log_z=-(10.0**at) / 10, rounded=3.0)] * 2 for at in range(count)]
    held = [[course(1.0, 2.0, log_z=0.01)] * 2] * count
    effect = output_logits.effect_of(dict(zip(output_logits._WAYS, (gone, held, held), strict=True)), 2, 20)
    assert [claim.holds for claim in effect.claims] == [True] * 8
    effect = output_logits.effect_of(dict(zip(output_logits._WAYS, (held, gone, gone), strict=True)), 2, 20)
    assert [claim.holds for claim in effect.claims] == [False, False, False, True, False, False, False, False]


def test_a_spike_is_found_where_it_is():
    loss = np.full([30, 1, 2], 0.5)
    rms = np.ones([30, 1, 2])
    rms[20:23, 0, 0] = 4.0
    loss[24, 0, 0] = 2.0
    seen = spikes.spike_of(adam_copies.Curves(loss, rms, rms, rms), 0, 20)
    assert (seen.before.tolist(), seen.jump.tolist(), seen.times.tolist()) == ([1, 1], [4, 1], [4, 1])
    assert (seen.lag[0], np.isnan(seen.lag[1])) == (4, True)
    loss[25, 0, 0] = np.nan
    assert np.isinf(spikes.spike_of(adam_copies.Curves(loss, rms, rms, rms), 0, 20).times[0])


@pytest.mark.slow
def test_a_run_is_the_same_from_the_same_seed_and_probes_both_blocks():
    made = small.SmallTransformer(True, 10)
    one, other = (made.run(1e-2, seed, z=1e-4, decay=0.0) for seed in (0, 1))
    again = made.run(1e-2, 0, z=1e-4, decay=0.0)
    np.testing.assert_array_equal(one.log_z, again.log_z)
    assert (one.end, one.logit.shape) == (again.end, (10, small.BLOCKS))
    assert one.end < one.first
    assert one.end != other.end
    assert made.run(1e-2, 0, z=1e-4, decay=0.1).end != one.end
    assert made.run(1e-2, 0, z=1.0, decay=0.0).end != one.end


def test_the_text_is_cut_as_the_task_cuts_it():
    characters = tf.range(100, dtype=tf.int32)
    inputs, following = small._windows(characters, tf.constant([0, 60]))
    assert inputs.shape == (2, small.CONTEXT)
    assert (following - inputs).numpy().tolist() == [[1] * small.CONTEXT] * 2
    assert int(inputs[1, 0]) == 60


def test_frequencies_alone_give_the_entropy_of_the_text():
    task = small.dataclasses.replace(
        small.text(), characters=np.array([0, 1] * 5000, np.uint8), test_characters=np.array([0, 1], np.uint8)
    )
    assert small.frequency_loss(task) == pytest.approx(np.log(2), rel=0.02)
