"""The global random number generators of the process."""

from __future__ import annotations

import random

import keras
import numpy as np
import tensorflow as tf

from loops.backend.generators import keras_generator, made_keras_generator, op_seeds
from loops.loop.state.variables import components


def generators() -> dict:
    """The states of all generators, as JSON.

    `python` and `numpy` are the modules' global generators. `tf_generator` is `tf.random.get_global_generator()`, None
    with deterministic operations and without a `tf.random.set_global_generator`. `keras_generator` is the seed
    generator that `keras.random` uses by default, None if it was not used yet. `op_seeds` is the generator from which
    TensorFlow draws the seeds of eager random operations, None without a global seed.
    """
    kind, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
    global_generator = _global_generator()
    made_by_keras = keras_generator()
    return {
        "tf_generator": _values(global_generator.state) if global_generator else None,
        "keras_generator": _values(made_by_keras.state) if made_by_keras else None,
        "op_seeds": _op_seeds(),
        "python": _python_state(random.getstate()),
        "numpy": [kind, np.asarray(words).tolist(), position, has_gauss, gauss],
    }


def set_generators(saved: dict, *, kernels: bool = True) -> None:
    """Restores all generators.

    Args:
        saved: What `generators` returned.
        kernels: Whether to also restart random operations that keep their position in their kernel, if there is a
            global seed. TensorFlow then prepares every compiled function again, which may take seconds.
    """
    if saved["tf_generator"] is not None:
        _assign((_global_generator() or _new_global_generator()).state, saved["tf_generator"])
    if saved["keras_generator"] is not None:
        made_by_keras = made_keras_generator()
        if made_by_keras:  # Otherwise a caveat has named it.
            _assign(made_by_keras.state, saved["keras_generator"])
    if saved["op_seeds"] is not None:
        _set_op_seeds(saved["op_seeds"], kernels)
    # Last, because creating Keras's generator draws from Python's.
    random.setstate(_tuple_state(saved["python"]))
    kind, words, *rest = saved["numpy"]
    np.random.set_state((kind, np.array(words, np.uint32), *rest))


def _global_generator() -> tf.random.Generator | None:
    try:
        return tf.random.get_global_generator()
    except RuntimeError:  # It would get a random seed, which deterministic operations forbid.
        return None


def _new_global_generator() -> tf.random.Generator:
    tf.random.set_global_generator(tf.random.Generator.from_seed(0))
    return tf.random.get_global_generator()


def _op_seeds() -> dict | None:
    known = op_seeds()
    return {"seed": known[0], "state": _python_state(known[1].getstate())} if known else None


def _set_op_seeds(saved: dict, kernels: bool) -> None:
    known = op_seeds()
    if kernels or known is None or known[0] != saved["seed"]:
        tf.random.set_seed(saved["seed"])
        known = op_seeds()
    if known:  # Otherwise a caveat has named it.
        known[1].setstate(_tuple_state(saved["state"]))


def _values(variable: tf.Variable | keras.Variable) -> list:
    return [component.numpy().tolist() for component in components(variable)]


def _assign(variable: tf.Variable | keras.Variable, values: list) -> None:
    parts = components(variable)
    # Another number of replicas takes what the first one had.
    for component, value in zip(parts, values if len(values) == len(parts) else values[:1] * len(parts), strict=True):
        component.assign(value)


def _python_state(state: tuple) -> list:
    version, words, gauss_next = state
    return [version, list(words), gauss_next]


def _tuple_state(state: list) -> tuple:
    version, words, gauss_next = state
    return version, tuple(words), gauss_next
