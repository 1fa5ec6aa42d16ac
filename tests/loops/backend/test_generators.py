"""Guards the process's own random generators: put back, all of them draw again what they drew."""

import json
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from loops.backend.generators import generators, set_generators

DRAWS = {
    "tf_generator": lambda: tf.random.get_global_generator().normal([3]).numpy().tolist(),
    "keras_generator": lambda: keras.random.normal([3]).numpy().tolist(),
    "op_seeds": lambda: tf.random.uniform([3]).numpy().tolist(),
    "python": lambda: [random.random(), random.gauss(0, 1)],
    "numpy": lambda: [np.random.rand(), np.random.normal()],
}


@pytest.mark.parametrize("kind", DRAWS)
def test_a_generator_draws_again_what_it_drew(kind):
    draw = DRAWS[kind]
    draw()
    saved = json.loads(json.dumps(generators()))
    expected = [draw(), draw()]
    keras.utils.set_random_seed(99)
    tf.random.get_global_generator().reset_from_seed(99)
    assert draw() != expected[0]
    set_generators(saved)
    assert [draw(), draw()] == expected


@pytest.mark.parametrize("kind", DRAWS)
def test_a_generator_that_is_left_out_is_seen(kind):
    draw = DRAWS[kind]
    draw()
    saved = generators()
    expected = draw()
    keras.utils.set_random_seed(99)
    tf.random.get_global_generator().reset_from_seed(99)
    saved[kind] = generators()[kind]
    set_generators(saved)
    assert draw() != expected


def test_saving_draws_no_numbers():
    before = [random.getstate(), np.random.get_state()[1].tolist()]
    generators()
    assert [random.getstate(), np.random.get_state()[1].tolist()] == before


def test_a_generator_that_deterministic_operations_forbid_is_none(monkeypatch):
    def refuse():
        raise RuntimeError("cannot be called if determinism is enabled")

    saved = generators()
    monkeypatch.setattr(tf.random, "get_global_generator", refuse)
    found = generators()
    assert found["tf_generator"] is None
    set_generators(found)
    monkeypatch.undo()
    set_generators(saved)
