"""The global random number generators of the process: their states, and those that have no public name.

    context._seed                   TensorFlow's global seed                   absent: not saved; a caveat of the run
    context._rng                    draws the seeds of eager random operations absent: the same
    global_state                    holds the generator of keras.random        absent: not saved; a caveat of the run
    seed_generator                  has its name                               absent: the same

`context` is a module of tensorflow.python, `global_state` and `seed_generator` of keras.src.

Restoring a generator that is no longer the one in use would have no effect: `caveats` detects that, too.
"""

from __future__ import annotations

import importlib
import inspect
import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from loops.backend import versions
from loops.backend.variables import components

_NO_SEED = 87654321
"""What `tf.compat.v1.get_seed` returns as the global seed if there is none."""


def op_seeds() -> tuple[int, random.Random] | None:
    """The global seed, and the generator of eager operations' seeds; None without a seed, or if it is hidden."""
    context = _module("tensorflow.python.eager.context")
    state = context.context() if hasattr(context, "context") else None
    seed, generator = getattr(state, "_seed", None), getattr(state, "_rng", None)
    return (int(seed), generator) if seed is not None and isinstance(generator, random.Random) else None


def keras_generator() -> keras.random.SeedGenerator | None:
    """The default generator of `keras.random`; None if it was not used yet, or is hidden.

    Keras's own function would create it, and draw a random number.
    """
    held, name = _module("keras.src.backend.common.global_state"), _name_in_keras()
    return held.get_global_attribute(name) if name and hasattr(held, "get_global_attribute") else None


def made_keras_generator() -> keras.random.SeedGenerator | None:
    """The default generator of `keras.random`, created if it was not used yet; None if it is hidden."""
    if _name_in_keras() is None:
        return None
    return keras_generator() or _module("keras.src.random.seed_generator").global_seed_generator()


def caveats() -> list[str]:
    """Which random numbers of a resumed run differ, because a generator is hidden; one sentence per generator."""
    found = []
    if int(tf.compat.v1.get_seed(0)[0]) != _NO_SEED and not _draws_from(op_seeds()):
        found.append(
            f"{versions()} hides where the seeds of eager random operations come from, so they cannot be saved: a "
            "resumed run draws others. Use a tf.random.Generator to lose nothing."
        )
    if _name_in_keras() is None or not hasattr(
        _module("keras.src.backend.common.global_state"), "get_global_attribute"
    ):
        found.append(
            f"{versions()} hides the default seed generator of keras.random, so it cannot be saved: a resumed run "
            "draws other numbers from it. Use your own keras.random.SeedGenerator to lose nothing."
        )
    return found


def _draws_from(known: tuple[int, random.Random] | None) -> bool:
    """Whether drawing a seed advances this generator, which is then restored."""
    if known is None:
        return False
    _, generator = known
    before = generator.getstate()
    tf.compat.v1.get_seed(None)
    moved = generator.getstate() != before
    generator.setstate(before)
    return moved


def _name_in_keras() -> str | None:
    """The name under which Keras keeps its generator, from the function that creates it; None if it is hidden."""
    module = _module("keras.src.random.seed_generator")
    make = getattr(module, "global_seed_generator", None)
    code = getattr(inspect.unwrap(make), "__code__", None) if make else None
    if code is None:
        return None
    if "GLOBAL_SEED_GENERATOR" in code.co_names:
        return getattr(module, "GLOBAL_SEED_GENERATOR", None)
    # Before Keras 3.13 the name was a literal.
    return "global_seed_generator" if "global_seed_generator" in code.co_consts else None


def _module(name: str) -> Any:
    """A module, or None if it does not exist."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def generators() -> dict:
    """The states of all generators, as JSON.

    `python` and `numpy` are the modules' global generators. `tf_generator` is `tf.random.get_global_generator()`, None
    with deterministic operations and without a `tf.random.set_global_generator`. `keras_generator` is the seed
    generator that `keras.random` uses by default, None if it was not used yet. `op_seeds` is the generator from which
    TensorFlow draws the seeds of eager random operations, None without a global seed.
    """
    kind, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
    global_generator = _global_generator()
    made_by_keras, seeds = keras_generator(), op_seeds()
    return {
        "tf_generator": _values(global_generator.state) if global_generator else None,
        "keras_generator": _values(made_by_keras.state) if made_by_keras else None,
        "op_seeds": {"seed": seeds[0], "state": _python_state(seeds[1].getstate())} if seeds else None,
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
        if _global_generator() is None:
            tf.random.set_global_generator(tf.random.Generator.from_seed(0))
        _assign(tf.random.get_global_generator().state, saved["tf_generator"])
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
