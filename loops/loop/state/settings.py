"""Settings of a run that a checkpoint does not restore: those of its optimizers and of its dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from loops.backend.datasets import argument
from loops.loop.state.identity import as_json, describe_optimizer, flat, same
from loops.loop.state.operations import kind, spelled
from loops.loop.state.pipeline import bottom_up
from loops.step.frozen_weights import named_by

_ARGUMENTS = ("batch_size", "buffer_size", "seed", "seed2")


def settings(train_step: object, dataset: tf.data.Dataset) -> dict:
    """The arguments of a program's optimizers and dataset before the first step, as JSON.

    Args:
        train_step: Any callable. In a user's own step, the optimizers that it names are found.
        dataset: The loop's.
    """
    facts: dict[str, Any] = {}
    for optimizer in reversed(named_by(train_step, keras.optimizers.Optimizer)):
        _add(facts, type(optimizer).__name__, describe_optimizer(optimizer))
    for part in bottom_up(dataset):
        made_with = {name: value for name in _ARGUMENTS if (value := argument(part, name)) is not None}
        if made_with:
            _add(facts, spelled(kind(type(part).__name__) or type(part).__name__), made_with)
    return as_json(facts)


def differences(saved: Mapping, here: Mapping) -> list[str]:
    """The settings that both programs have with different values, as sentences with both."""
    then, now = flat(saved), flat(here)
    names = [name for name in then if name in now and not same(then[name], now[name])]
    return [f"{name} was {then[name]!r} and is {now[name]!r}" for name in names]


def _add(facts: dict, name: str, value: Any) -> None:
    number = sum(other.split(" ")[0] == name for other in facts) + 1
    facts[name if number == 1 else f"{name} {number}"] = value
