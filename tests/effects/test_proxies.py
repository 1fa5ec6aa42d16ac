"""Guards the effects of high learning rates: what their networks and optimizers compute, and their verdicts."""

import dataclasses
import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.effects import adam_copies, attention_logits, output_logits, spikes
from benchmarks.effects import small_transformer as small
from benchmarks.effects.adam_copies import CLIPPED, STABLE, Moments, Setup, stepped
from benchmarks.effects.effect import told
from loops.tasks.text import ALPHABET

text = functools.cache(small.text)
"""The task, read once."""


def after(setup, start, grads):
    """The weights after a step for each gradient, in plain NumPy, from the algorithm's description."""
    weight, first, second = (np.zeros_like(start) for _ in range(3))
    weight = start.astype(np.float64)
    for step, grad in enumerate(grads.astype(np.float64), 1):
        if setup.way == CLIPPED:
            grad = grad * min(1.0, setup.limit / np.sqrt((grad**2).sum()))
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
    setups.append(Setup(0.2, 0.99, way=CLIPPED, limit=0.1))
    generator = np.random.default_rng(0)
    start = generator.normal(size=(5, 3, 2)).astype(np.float32)
    grads = generator.normal(size=(6, 5, 3, 2)).astype(np.float32)
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
    assert np.allclose(ratios[0], 1, atol=0.1)
    assert ratios[3][3] > 1.5


def test_the_plain_way_is_adamw():
    start = np.random.default_rng(1).normal(size=(1, 3, 2)).astype(np.float32)
    variable = tf.Variable(start[0])
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=adam_copies.DECAY, beta_2=0.99, epsilon=1e-8)
    weights, moments = [tf.constant(start)], [Moments(tf.zeros_like(start), tf.zeros_like(start))]
    each = Setup(*(np.array([value]) for value in Setup(0.05, 0.99)))
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


def attention_effect(*shown):
    return told("attention-logits", 2, 20, attention_logits.found_of(*shown, 20))


def course(logit, end, entropy=1.0, steps=20):
    return small.Course(np.tile([logit, logit / 2], [steps, 1]), np.full([steps, 2], entropy), 4.6, end)


def test_the_verdicts_about_attention_are_of_the_numbers():
    count = len(small.RATES)
    grown = [[course(10.0 * 10**at, 2.0 if at < 3 else 4.0, 1.5 if at < 3 else 0.1)] * 2 for at in range(count)]
    held = [[course(5.0, 2.0)] * 2] * count
    plain, normal = attention_logits._WAYS
    alone = np.array([2.4, 2.6])
    effect = attention_effect({plain: grown, normal: held}, 3.0, alone)
    assert [claim.holds for claim in effect.claims] == [True] * 9
    assert effect.beside[1][2] == "2 of 2 with a logit above 10^4, 2 of 8 of the others"
    assert [row[5:] for row in effect.rows if row[1] == plain][2:4] == [("0 of 2", "0 of 2"), ("2 of 2", "2 of 2")]
    short = attention_effect({plain: grown, normal: held}, 3.0, alone - 1)
    assert [number for number, claim in enumerate(short.claims) if claim.holds is None] == [1]
    costly = [[course(5.0, 2.0 if at < 3 else 3.5)] * 2 for at in range(count)]
    effect = attention_effect({plain: grown, normal: costly}, 3.0, alone)
    assert [number for number, claim in enumerate(effect.claims) if claim.holds is None] == [2]
    better = attention_effect({plain: grown, normal: held}, 4.5, alone + 2)
    assert [number for number, claim in enumerate(better.claims) if not claim.holds] == [1, 3]
    effect = attention_effect({plain: held, normal: grown}, 3.0, alone)
    assert [number for number, claim in enumerate(effect.claims) if claim.holds is None] == [1]
    assert [number for number, claim in enumerate(effect.claims) if claim.holds] == [8]


def output_effect(runs):
    return told("output-logits", 2, 20, output_logits.found_of(runs, 20))


def drifted(*farthest, power=6):
    """Runs in which log Z of each way goes from 4 to so much at the highest rate, as this power of time."""
    reached = np.outer(farthest, np.linspace(0.4, 1, len(output_logits.RATES))).ravel()
    done = np.linspace(0, 1, 20)[:, None, None] ** power
    log_z = 4 + done * (np.repeat(reached[:, None], 2, axis=1) - 4)
    end = np.repeat(2 - reached[:, None] / 100, 2, axis=1)
    return output_logits.Runs(log_z, log_z - 3, np.full_like(end, 4.6), end, end)


def test_the_verdicts_about_outputs_are_of_the_numbers():
    effect = output_effect(drifted(-20.0, -0.5, -5.0))
    assert [claim.holds for claim in effect.claims] == [True] * 7
    assert [number for number, claim in enumerate(effect.claims) if not claim.published] == [3, 5]
    early = output_effect(drifted(-20.0, -0.5, -5.0, power=0.5))
    assert [number for number, claim in enumerate(early.claims) if claim.holds is not True] == [2]
    assert early.claims[2].holds is False
    assert early.measured["step at which log Z has parted from that with z-loss at 0.1"] == [1.5, 1.5]
    assert early.measured["step at which it has half of its distance at 0.1"] == [5.5, 5.5]
    even = output_effect(drifted(-20.0, -0.5, -5.0, power=1))
    assert [number for number, claim in enumerate(even.claims) if claim.holds is None] == [2]
    effect = output_effect(drifted(2.0, 5.0, 2.0))
    assert not any(claim.holds for claim in effect.claims)
    alike = output_effect(drifted(-1.0, -0.5, -0.5))
    assert alike.claims[2].holds is None


def spikes_effect(changed, level):
    return told("spikes", 2, 100, spikes.found_of(changed, level, 40))


def changed(high, ways):
    """Curves of which those of some ways have a spike four steps after the change at step 40, higher with beta2."""
    count = len(spikes.WAYS)
    loss, rms = np.full([100, 3 * count, 2], 0.5), np.ones([100, 3 * count, 2])
    rms[40, :] = 4.0
    for beta, share in enumerate((0.3, 0.6, 1.0)):
        loss[43:46, [count * beta + way for way in ways]] = 0.5 * (1 + high * share)
    return adam_copies.Curves(loss, rms, rms, rms, rms)


def test_the_verdicts_about_spikes_are_of_the_numbers():
    falling = np.repeat(1 / (1 + np.array(spikes.EPSILONS) / 1e-4)[None, :, None], 100, axis=0)
    level = adam_copies.Curves(falling, falling, falling, np.full_like(falling, 1e-4), falling)
    effect = spikes_effect(changed(1.0, (0, 1, 2)), level)
    # All ways end alike.
    assert [number for number, claim in enumerate(effect.claims) if claim.holds is not True] == [4, 9, 10]
    assert [number for number, claim in enumerate(effect.claims) if not claim.published] == [0, 2, 3, 6, 7, 8, 10]
    narrow = spikes_effect(changed(1.0, (0, 1)), level)
    assert [number for number, claim in enumerate(narrow.claims) if not claim.holds] == [4, 9, 10]
    late = changed(1.0, (0, 1))
    late.loss[90, 3 :: len(spikes.WAYS)] = 1.5
    effect = spikes_effect(late, level)
    assert [number for number, claim in enumerate(effect.claims) if not claim.holds] == [4, 6, 8, 9]
    assert "(above 1.5 times in 0 of 2)" in effect.claims[5].text
    assert "(above in 2 of 2; AdamW in 0, clipped to 0.01 in 0)" in effect.claims[6].text
    early = spikes_effect(changed(1.0, (0, 1, 3)), level)
    assert [claim.holds for claim in early.claims[5:7]] == [False, True]
    # At beta2 0.9 the first moment is as slow, so that no update is too long: that arm decides nothing.
    smaller = changed(1.0, (0, 1))
    smaller.loss[43:46, 0] = 5.0
    count = len(spikes.WAYS)
    for of_one, of_other, expected in [
        (0.6, 0.6, True),
        (0.6, 0.9, None),
        (0.9, 0.9, None),
        (0.9, 1.01, None),
        (1.0, 1.01, False),
    ]:
        smaller.loss[43:46, count] = of_one, of_other
        assert spikes_effect(smaller, level).claims[4].holds is expected
    assert "smaller in 0 of 2 seeds" in spikes_effect(smaller, level).claims[4].text
    flat = level._replace(update=np.ones_like(falling))
    effect = spikes_effect(changed(1.0, (3,)), flat)
    assert [number for number, claim in enumerate(effect.claims) if claim.holds] == [0, 6, 10]
    # No spike has no lag, and is not resolved.
    assert [effect.claims[number].holds for number in (2, 3, 4)] == [None] * 3


def test_each_beta2_has_a_verdict_on_its_lags_and_an_end_needs_all_seeds():
    level = adam_copies.Curves(*np.ones([5, 100, len(spikes.EPSILONS), 2]))
    count = len(spikes.WAYS)
    curves = changed(1.0, (0, 1))
    curves.loss[43:46, count] = 0.5
    curves.loss[49, count, 0] = 1.0
    curves.loss[-1, 2 * count + 3, 0] = 0.4
    claims = spikes_effect(curves, level).claims
    assert [claim.holds for claim in claims[2:4]] == [True, False]
    assert "in 0 of 1 seeds" in claims[3].text
    assert claims[9].holds is None
    curves.loss[43:46, count, 1] = 1.0
    curves.loss[-1, 2 * count + 3] = 0.4
    claims = spikes_effect(curves, level).claims
    assert (claims[3].holds, claims[9].holds) == (None, True)
    assert "in 1 of 2 seeds" in claims[3].text


def test_a_spike_is_found_where_it_is():
    loss = np.full([30, 1, 2], 0.5)
    rms = np.ones([30, 1, 2])
    rms[20:23, 0, 0] = 4.0
    loss[24, 0, 0] = 2.0
    seen = spikes.spike_of(adam_copies.Curves(loss, rms, rms, rms, rms), 0, 20)
    assert (seen.before.tolist(), seen.jump.tolist(), seen.times.tolist()) == ([1, 1], [4, 1], [4, 1])
    assert (seen.lag[0], np.isnan(seen.lag[1])) == (4, True)
    late = np.roll(rms, 6, axis=0)
    assert np.isnan(spikes.spike_of(adam_copies.Curves(loss, late, rms, rms, rms), 0, 20).lag).all()
    loss[24, 0, 0] = 0.7
    mild = spikes.spike_of(adam_copies.Curves(loss, rms, rms, rms, rms), 0, 20)
    assert (mild.times.tolist(), np.isnan(mild.lag).all()) == ([1.4, 1], True)
    loss[25, 0, 0] = np.nan
    assert np.isinf(spikes.spike_of(adam_copies.Curves(loss, rms, rms, rms, rms), 0, 20).times[0])


@pytest.mark.exhaustive
def test_a_run_is_the_same_from_the_same_seed_and_probes_both_blocks():
    made = small.SmallTransformer(True, 10)
    one, other, again = (made.run(1e-2, seed) for seed in (0, 1, 0))
    np.testing.assert_array_equal(one.logit, again.logit)
    assert (one.end, one.logit.shape, one.entropy.shape) == (again.end, (10, small.BLOCKS), (10, small.BLOCKS))
    assert one.end < one.first
    assert one.end != other.end


def test_a_transformer_without_layers_normalizes_what_it_embeds():
    weights = [weight[:1] for weight in output_logits._start(2, 1)]
    weights[1] = tf.constant(np.linspace(1, 2, output_logits.WIDTH, dtype=np.float32)[None, None])
    norm = keras.layers.LayerNormalization(center=False, epsilon=1e-6)
    norm.build((None, output_logits.WIDTH))
    norm.gamma.assign(weights[1][0, 0])
    given = tf.one_hot([[3, 7]], len(ALPHABET))
    expected = norm(tf.gather(weights[0][0], [3, 7])) @ weights[2][0]
    np.testing.assert_allclose(output_logits.logits_of(weights, given)[0], expected, rtol=1e-4, atol=1e-5)


def test_the_held_out_loss_is_that_of_each_pair():
    task = dataclasses.replace(text(), test_characters=np.array([1, 2, 1, 2, 5], np.uint8))
    weights = output_logits._start(1, 1)
    logits = output_logits.logits_of(weights, tf.one_hot([[1, 2, 1, 2]], len(ALPHABET)))
    expected = tf.nn.sparse_softmax_cross_entropy_with_logits([[2, 1, 2, 5]], logits)
    plain, rounded = output_logits._held_out(
        weights, output_logits.pairs_of(task.test_characters[:-1], task.test_characters[1:])
    )
    assert float(plain[0]) == pytest.approx(float(tf.reduce_mean(expected)), rel=1e-5)
    assert float(rounded[0]) == pytest.approx(float(plain[0]), rel=1e-2)
    assert float(rounded[0]) != float(plain[0])


@pytest.mark.slow
def test_z_loss_holds_log_z_and_each_way_learns():
    setups = [Setup(0.1, 0.95, way=CLIPPED, decay=0.0)] * 2
    runs = output_logits.train(setups, [0.0, 1.0], seeds=2, steps=100)
    assert runs.log_z.shape == runs.logit.shape == (2, 2, 2)
    assert (runs.end < runs.first).all()
    assert (np.abs(runs.log_z[-1, 1]) < np.abs(runs.log_z[-1, 0])).all()
    assert (runs.first[0] == runs.first[1]).all()
    other = output_logits.pairs_of(np.array([1, 1, 2]), np.array([2, 2, 5]))
    assert (output_logits.train(setups, [0.0, 1.0], seeds=2, steps=1, held_out=other).first != runs.first).all()


def test_pairs_are_counted_and_examples_follow_the_text():
    pairs = output_logits.pairs_of(np.array([1, 1, 2]), np.array([2, 2, 5]))
    assert (pairs[1, 2], pairs[2, 5], pairs.sum()) == pytest.approx((2 / 3, 1 / 3, 1))
    given, following = small.held_out(text())
    assert (given[:, 1:] == following[:, :-1]).numpy().all()


def test_the_text_is_cut_as_the_task_cuts_it():
    characters = tf.range(100, dtype=tf.int32)
    inputs, following = small._windows(characters, tf.constant([0, 60]))
    assert inputs.shape == (2, small.CONTEXT)
    assert (following - inputs).numpy().tolist() == [[1] * small.CONTEXT] * 2
    assert int(inputs[1, 0]) == 60


def test_frequencies_alone_give_the_entropy_of_the_text():
    task = dataclasses.replace(
        text(), characters=np.array([0, 1] * 5000, np.uint8), test_characters=np.array([0, 1], np.uint8)
    )
    assert small.frequency_loss(task) == pytest.approx(np.log(2), rel=0.02)


def test_the_text_task_takes_a_class_of_attention():
    model = text().model("float32", small.NormalizedAttention)
    own = [layer for layer in model.layers if isinstance(layer, small.NormalizedAttention)]
    assert len(own) == small.BLOCKS
    # Two norms, of queries and of keys, each with one factor for each number of a head.
    factors = [weight for layer in own for weight in layer.trainable_weights if "norm" in weight.path.split("/")[-2]]
    assert sum(int(tf.size(weight)) for weight in factors) == 2 * small.BLOCKS * small.WIDTH // 4
