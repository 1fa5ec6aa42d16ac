"""The settings, other than arithmetic, in which two runs differ, as far as they record them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SETTINGS = ("task", "seed", "learning_rate", "batch_size", "batches", "accumulate", "optimizer", "loss_factor")


def settings_that_differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings that both runs record with different values, each with both values.

    Args:
        one: The first run's `Recorded.facts`.
        other: The other run's `Recorded.facts`.
    """
    first, second = _flat(one), _flat(other)
    shared = [name for name in first if name in second]
    different = [name for name in shared if str(first[name]) != str(second[name])]
    return tuple(f"{name} is {_shown(first[name])} and {_shown(second[name])}" for name in different)


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name in _SETTINGS:
        value = facts.get(name)
        parts = value.items() if isinstance(value, Mapping) else [(None, value)]
        flat.update({f"{name}.{part}" if part else name: each for part, each in parts if each is not None})
    return flat


def _shown(value: object) -> str:
    # Keras keeps a learning rate in float32.
    return f"{value:.7g}" if isinstance(value, float) else str(value)
