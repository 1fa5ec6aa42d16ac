"""Guards the text task: real text, predictions that look back only, and runs in every format."""

import math

import keras
import numpy as np
import pytest

import loops
from loops import tasks
from loops.run.train import POLICIES
from loops.tasks import text


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
