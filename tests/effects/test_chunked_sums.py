"""Guards what the page on long sums stands on: its sums, its operands, and what it claims of given numbers."""

import itertools

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.effects import chunked_sums
from benchmarks.effects.chunked_sums import CHUNK, FORMATS, TERMS, WAYS, summation
from benchmarks.effects.effect import written
from loops import tasks

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def rows(count, seed=0):
    drawn = np.random.default_rng(seed)
    return (
        drawn.integers(-3, 4, (count, 2)).astype(np.float32) / 4,
        drawn.integers(-7, 8, (count, 3)).astype(np.float32) / 8,
    )


def plain(left, right, dtype, chunk):
    """One addition after the other in NumPy's own scalars of the format, for each element by itself."""
    result = []
    for i, j in itertools.product(range(left.shape[1]), range(right.shape[1])):
        products = left[:, i] * right[:, j]
        total = dtype(0)
        for start in range(0, len(products), chunk):
            part = dtype(0)
            for product in products[start : start + chunk]:
                part = dtype(np.float32(part) + np.float32(product))
            total = dtype(np.float32(total) + np.float32(part))
        result.append(float(total))
    return np.array(result, np.float32).reshape(left.shape[1], -1)


@pytest.mark.parametrize(("name", "way", "chunk"), [("float16", "in order", 1), ("bfloat16", "chunks", CHUNK)])
def test_sums_are_those_of_the_format_itself(name, way, chunk):
    left, right = rows(2 * CHUNK)
    found = summation(name, way)(left, right, (0, 0))
    assert found.shape == (2, 2, 3)
    for at in range(2):
        part = slice(0, (at + 1) * CHUNK)
        np.testing.assert_array_equal(found[at], plain(left[part], right[part], DTYPES[name], chunk))


def test_a_large_sum_swamps_ones_and_chunks_do_not():
    ones = np.ones([16 * CHUNK, 1], np.float32)
    last = {way: float(summation("bfloat16", way)(ones, ones, (0, 0))[-1, 0, 0]) for way in WAYS}
    assert last["in order"] == 256
    assert last["chunks"] == 1024
    assert last["at random"] == pytest.approx(1024, rel=0.2)


def test_random_sums_have_the_right_mean_and_follow_their_seed():
    ones = np.ones([8 * CHUNK, 1], np.float32)
    add = summation("bfloat16", "at random")
    drawn = [float(add(ones, np.ones([8 * CHUNK, 50], np.float32), (seed, 0))[-1].mean()) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == pytest.approx(512, rel=0.02)


def test_operands_multiply_to_the_gradient_and_a_step_along_it_makes_all_the_progress():
    """That of a tape; and the weights are put back."""
    keras.utils.set_random_seed(0)
    task = tasks.load("digits")
    model = task.model("float32")
    images, labels = tf.constant(task.images[:8]), tf.constant(task.labels[:8])
    pairs = chunked_sums.of_kernels(model, task.loss, images, labels)
    exact = chunked_sums.gradients(model, task.loss, images, labels)
    assert [left.shape for left, _ in pairs] == [(512, 9), (128, 144), (32, 288)]
    for (left, right), gradient in zip(pairs, exact, strict=True):
        np.testing.assert_allclose(left.T @ right, gradient, rtol=1e-3, atol=1e-5)
    before = [layer.kernel.numpy() for layer in chunked_sums.convolutions(model)]
    found = chunked_sums.progress(
        model,
        task.loss,
        images,
        labels,
        exact,
        {("same", ""): exact, ("half", ""): [each / 2 for each in exact], ("back", ""): [-each for each in exact]},
    )
    assert found["same", ""] == 1
    assert found["half", ""] == pytest.approx(0.5, abs=0.1)
    assert found["back", ""] < 0
    for layer, old in zip(chunked_sums.convolutions(model), before, strict=True):
        np.testing.assert_array_equal(layer.kernel.numpy(), old)


def made_up(**changes):
    """Two seeds: the numbers of a run in which all that is published holds."""
    both = itertools.product(FORMATS, WAYS)
    numbers = {"swamped": 0.5, "chunks": 0.001, "at random": 0.005, "gradient": 0.02, "noise": 1.0}
    numbers |= changes
    error, gradient = {}, {}
    for name, way in both:
        last = numbers["swamped"] if way == "in order" else numbers[way]
        for terms in TERMS:
            error[terms, name, way] = np.tile([0.0001, last], (2, 1))
        gradient[name, way] = np.full(2, numbers["gradient"] * (1.5 if way == "in order" else 1))
    holds = chunked_sums.holds_of(error, gradient, np.full(2, numbers["noise"]))
    return [np.all(holds[claim]) for claim in written("chunked-sums")["claims"]]


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({}, []),
        ({"swamped": 0.09}, [0]),
        ({"chunks": 0.06}, [1, 2]),
        ({"at random": 0.06}, [3, 4]),
        ({"gradient": 0.06}, [6]),
        ({"gradient": -0.02}, [5]),
        ({"noise": 0.025}, [7]),
    ],
)
def test_a_verdict_follows_from_the_numbers(changes, failing):
    assert [number for number, holds in enumerate(made_up(**changes)) if not holds] == failing
