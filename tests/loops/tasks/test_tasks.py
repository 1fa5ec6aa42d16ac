"""Guards the tasks: the data is what it is said to be, in the same order for a seed, and what is missing is named."""

import collections
import math
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from loops import tasks
from loops.run.train import POLICIES
from loops.tasks import text


def fake_mnist():
    random = np.random.default_rng(0)

    def part(count):
        return random.integers(0, 256, (count, 28, 28)).astype(np.uint8), random.integers(0, 10, count).astype(np.uint8)

    return part(100), part(20)


def test_the_digits_are_all_there_and_split_the_same_way(digits):
    assert digits.name == "digits"
    assert (len(digits.images), len(digits.test_images)) == (1438, 359)
    for images, labels in ((digits.images, digits.labels), (digits.test_images, digits.test_labels)):
        assert images.dtype == np.float32
        assert labels.dtype == np.int32
        assert images.shape == (len(labels), 8, 8, 1)
        assert images.min() == 0
        assert images.max() == 1
        assert set(labels.tolist()) == set(range(10))
    again = tasks.load("digits")
    np.testing.assert_array_equal(again.test_images, digits.test_images)
    np.testing.assert_array_equal(again.labels, digits.labels)


@pytest.mark.slow
def test_no_image_is_used_twice(digits):
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = np.concatenate([digits.images, digits.test_images]) * 16
    pairs = zip(images, np.concatenate([digits.labels, digits.test_labels]), strict=True)
    ours = collections.Counter((image.astype(np.int64).tobytes(), int(label)) for image, label in pairs)
    originals = zip(pixels, labels, strict=True)
    assert ours == collections.Counter((image.astype(np.int64).tobytes(), int(label)) for image, label in originals)


def take(task, batches, seed, batch_size=500):
    return [[part.numpy() for part in one] for one in task.dataset(batch_size, seed).take(batches)]


def test_a_seed_gives_the_same_endless_batches(digits):
    # 2.9 batches are an epoch: these are the first four.
    first, again, other = (take(digits, 12, seed) for seed in (1, 1, 2))
    for one, same in zip(first, again, strict=True):
        np.testing.assert_array_equal(one[0], same[0])
        np.testing.assert_array_equal(one[1], same[1])
    assert any(np.any(one[1] != two[1]) for one, two in zip(first, other, strict=True))
    assert {one[0].shape for one in first} == {(500, 8, 8, 1)}
    assert first[0][0].dtype == np.float32
    assert first[0][1].dtype == np.int32


def test_an_epoch_holds_every_image_once_and_the_next_is_in_another_order(digits):
    epochs = take(digits, 4, seed=3, batch_size=719)
    assert len(digits.images) == 2 * 719
    labels = [np.concatenate([one[1] for one in epochs[at : at + 2]]) for at in (0, 2)]
    for one in labels:
        np.testing.assert_array_equal(np.bincount(one), np.bincount(digits.labels))
    assert np.any(labels[0] != labels[1])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_has_the_dtypes_of_its_policy_and_float32_logits(digits, policy):
    model = digits.model(policy)
    expected = keras.DTypePolicy(policy).variable_dtype
    assert {variable.dtype for variable in model.trainable_variables} == {expected}
    assert {layer.compute_dtype for layer in model.layers[:-1]} == {keras.DTypePolicy(policy).compute_dtype}
    logits = model(digits.images[:3])
    assert logits.dtype == tf.float32
    assert logits.shape == (3, 10)
    assert digits.loss(digits.labels[:3], logits).dtype == tf.float32
    assert digits.loss(digits.labels[:3], logits).shape == ()
    assert keras.config.dtype_policy().name == "float32"


def test_loss_and_accuracy_are_what_they_are_called(digits):
    logits = tf.constant([[0.0] * 10, [20.0] + [0.0] * 9])
    expected = (np.log(10) + np.log(1 + 9 * np.exp(-20))) / 2
    np.testing.assert_allclose(digits.loss(tf.constant([3, 0]), logits), expected, rtol=1e-6)

    class Constant:
        def __init__(self, logits):
            self.logits = np.float32(logits)

        def predict(self, images, **_):
            return np.tile(self.logits, (len(images), 1))

    assert digits.accuracy(Constant([0] * 7 + [1, 0, 0])) == np.mean(digits.test_labels == 7)
    # A row of NaN has its largest value at place 0, and is still no 0.
    assert digits.accuracy(Constant([np.nan] * 10)) == 0.0
    assert digits.accuracy(Constant([np.inf] + [0] * 9)) == 0.0


def test_mnist_comes_from_keras(monkeypatch):
    monkeypatch.setattr(keras.datasets.mnist, "load_data", fake_mnist)
    task = tasks.load("mnist")
    (pixels, labels), (_, test_labels) = fake_mnist()
    assert task.name == "mnist"
    assert task.images.shape == (100, 28, 28, 1)
    assert task.images.dtype == np.float32
    np.testing.assert_array_equal(task.images[..., 0], (pixels / 255).astype(np.float32))
    np.testing.assert_array_equal(task.labels, labels)
    np.testing.assert_array_equal(task.test_labels, test_labels)
    assert task.labels.dtype == task.test_labels.dtype == np.int32
    assert task.model("float32")(take(task, 1, 0, 4)[0][0]).shape == (4, 10)


def test_mnist_without_a_network_names_the_way_out(monkeypatch):
    def fail():
        raise Exception("URL fetch failure on https://example")

    monkeypatch.setattr(keras.datasets.mnist, "load_data", fail)
    with pytest.raises(loops.LoopError) as caught:
        tasks.load("mnist")
    for said in ("URL fetch failure", "mnist.npz", "~/.keras/datasets", "digits"):
        assert said in str(caught.value)


def test_digits_without_scikit_learn_name_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(loops.LoopError, match=r'scikit-learn: pip install "halfstep\[study\]"'):
        tasks.load("digits")


@pytest.mark.parametrize("name", ["cifar", "", "Digits"])
def test_an_unknown_task_is_named_with_those_there_are(name):
    with pytest.raises(scaler.InvalidArgument, match=f"task {name!r}: expected one of digits, mnist, text"):
        tasks.load(name)


@pytest.fixture(scope="module")
def tiny():
    characters = text.encode("def add(a, b):\n    return a + b\n" * 60)
    return tasks.TextTask(
        "text", characters, characters[5:400], context=8, width=16, blocks=1, test_examples=16, batch_size=4
    )


def decoded(characters):
    return "".join(text.ALPHABET[place] for place in characters)


def test_the_text_is_the_library_s_own():
    task = tasks.load("text")
    assert len(task.characters) == 2_000_000
    assert len(task.test_characters) > 100_000
    assert task.characters.dtype == np.uint8
    whole, held_out = decoded(task.characters), decoded(task.test_characters)
    assert "class ArgumentParser" in whole + held_out
    assert "def " in held_out
    place = len(held_out) // 2
    assert held_out[place : place + 300] not in whole


def test_characters_are_kept_but_for_tabs_and_those_beyond_ascii():
    assert decoded(text.encode("a\tb\nç~ é")) == "a   b\n~ "


def test_an_epoch_has_every_example_once_and_what_follows_it(tiny):
    count = (len(tiny.characters) - 1) // 8
    epochs = [[part.numpy() for part in one] for one in tiny.dataset(count, seed=1).take(2)]
    for inputs, following in epochs:
        assert inputs.dtype == following.dtype == np.int32
        np.testing.assert_array_equal(inputs[:, 1:], following[:, :-1])
        expected = np.sort(tiny.characters[: count * 8].reshape(-1, 8), axis=0)
        np.testing.assert_array_equal(np.sort(inputs, axis=0), expected)
    assert np.any(epochs[0][0] != epochs[1][0])
    again = next(iter(tiny.dataset(count, seed=1)))[0].numpy()
    np.testing.assert_array_equal(again, epochs[0][0])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prediction_sees_nothing_of_what_follows(tiny, policy):
    model = tiny.model(policy)
    inputs = np.arange(8, dtype=np.int32)[np.newaxis]
    changed = inputs.copy()
    changed[0, 5] = 40
    first, second = (model(one).numpy() for one in (inputs, changed))
    assert first.dtype == np.float32
    assert first.shape == (1, 8, len(text.ALPHABET))
    np.testing.assert_array_equal(first[0, :5], second[0, :5])
    assert all(np.any(first[0, place] != second[0, place]) for place in range(5, 8))
    assert {v.dtype for v in model.trainable_variables} == {keras.DTypePolicy(policy).variable_dtype}


def test_perplexity_is_what_it_is_called(tiny):
    class Constant:
        def __init__(self, value):
            self.value = value

        def predict(self, inputs, **_):
            logits = np.zeros([*inputs.shape, len(text.ALPHABET)], np.float32)
            logits[..., 3] = self.value
            return logits

    assert tiny.scores(Constant(0.0))["perplexity"] == pytest.approx(96, rel=1e-5)
    assert math.isnan(tiny.scores(Constant(np.nan))["perplexity"])
    assert tiny.scores(Constant(1e4))["perplexity"] == math.inf


def test_a_python_without_its_source_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(text.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(loops.LoopError, match="has no source"):
        tasks.load("text")
