"""Random number generators of the process that have no public name.

    context._seed                   TensorFlow's global seed                   absent: not saved; a caveat of the run
    context._rng                    draws the seeds of eager random operations absent: as context._seed
    global_state                    holds the generator of keras.random        absent: not saved; a caveat of the run
    seed_generator                  says under which name                      absent: as global_state
    config.is_op_determinism_enabled  tells whether datasets keep their order  absent: counts as no, one caveat more

`context` and `config` are modules of tensorflow.python, `global_state` and `seed_generator` of keras.src.

A generator that is there and is not what is drawn from would be restored in vain: `caveats` finds that out, too.
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
"""What `tf.compat.v1.get_seed` gives for the global seed where there is none."""


def op_seeds() -> tuple[int, random.Random] | None:
    """The global seed, and what eager operations draw their seeds from; None without a seed, or where it is hidden."""
    context = _module("tensorflow.python.eager.context")
    state = context.context() if hasattr(context, "context") else None
    seed, generator = getattr(state, "_seed", None), getattr(state, "_rng", None)
    return (int(seed), generator) if seed is not None and isinstance(generator, random.Random) else None


def keras_generator() -> keras.random.SeedGenerator | None:
    """What `keras.random` draws from without a seed; None if it was not used yet, or where it is hidden.

    Asking Keras for it would make it, and draw a random number.
    """
    held, name = _module("keras.src.backend.common.global_state"), _name_in_keras()
    return held.get_global_attribute(name) if name and hasattr(held, "get_global_attribute") else None


def made_keras_generator() -> keras.random.SeedGenerator | None:
    """The same, made if it was not used yet; None where it is hidden."""
    if _name_in_keras() is None:
        return None
    return keras_generator() or _module("keras.src.random.seed_generator").global_seed_generator()


def ordered_by_force() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` is on, which orders what a dataset does in parallel."""
    enabled = getattr(_module("tensorflow.python.framework.config"), "is_op_determinism_enabled", None)
    return bool(enabled and enabled())


def caveats() -> list[str]:
    """What a resumed run draws otherwise, because the installed versions hide a generator; a sentence for each."""
    found = []
    if _has_global_seed() and not _draws_from(op_seeds()):
        found.append(
            f"{versions()} hides where the seeds of eager random operations come from, so that they cannot be saved: "
            "a resumed run draws others. Use a tf.random.Generator to lose nothing."
        )
    if _name_in_keras() is None or not hasattr(
        _module("keras.src.backend.common.global_state"), "get_global_attribute"
    ):
        found.append(
            f"{versions()} hides the seed generator that keras.random uses without a seed, so that it cannot be saved: "
            "a resumed run draws others from it. Use a keras.random.SeedGenerator of your own to lose nothing."
        )
    return found


def _has_global_seed() -> bool:
    return int(tf.compat.v1.get_seed(0)[0]) != _NO_SEED


def _draws_from(known: tuple[int, random.Random] | None) -> bool:
    """Whether drawing a seed moves this generator, which is put back."""
    if known is None:
        return False
    _, generator = known
    before = generator.getstate()
    tf.compat.v1.get_seed(None)
    moved = generator.getstate() != before
    generator.setstate(before)
    return moved


def _name_in_keras() -> str | None:
    """The name under which Keras holds its generator, as the function that makes it has it; None where it is hidden."""
    module = _module("keras.src.random.seed_generator")
    make = getattr(module, "global_seed_generator", None)
    code = getattr(inspect.unwrap(make), "__code__", None) if make else None
    if code is None:
        return None
    if "GLOBAL_SEED_GENERATOR" in code.co_names:
        return getattr(module, "GLOBAL_SEED_GENERATOR", None)
    # Before Keras 3.13 the name was written out where it is used.
    return "global_seed_generator" if "global_seed_generator" in code.co_consts else None


def _module(name: str) -> Any:
    """A module, or None if it is not there."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
