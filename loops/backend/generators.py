"""Global random number generators without public names.

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
import tensorflow as tf

from loops.backend.versions import versions

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
    if _has_global_seed() and not _draws_from(op_seeds()):
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


def _has_global_seed() -> bool:
    """Whether TensorFlow has a global seed."""
    return int(tf.compat.v1.get_seed(0)[0]) != _NO_SEED


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
