"""The optimizers of a Keras model."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from scaler.backend.layers import unused
from scaler.keras.optimizer import LossScaleOptimizer


@dataclasses.dataclass(frozen=True)
class Held:
    """An optimizer, and where a model holds it."""

    path: tuple[str, ...]
    optimizer: keras.optimizers.Optimizer
    own: bool
    """Whether the model holds it otherwise than through a model inside, which may be there for its weights alone."""


def optimizers_of(model: keras.Model) -> list[Held]:
    """Finds every optimizer that is held by the model, its layers, or the models inside, also in lists and dicts."""
    found: dict[int, Held] = {}
    seen = {id(model)}
    waiting: collections.deque = collections.deque([((), model, True)])
    while waiting:
        path, holder, own = waiting.popleft()
        # Attributes first: Keras lists all of them once more in attributes of its own.
        held = sorted(vars(holder).items(), key=lambda item: isinstance(item[1], (list, tuple, set, dict)))
        for name, value in _parts(held):
            if isinstance(value, keras.optimizers.Optimizer):
                found.setdefault(id(value), Held((*path, name), value, own))
            elif id(value) not in seen:
                seen.add(id(value))
                waiting.append(((*path, name), value, own and not isinstance(value, keras.Model)))
    return list(found.values())


def loss_scale_optimizers(model: keras.Model) -> dict[str, LossScaleOptimizer]:
    """Finds ours by name, each once: the compiled one, or several as in a GAN.

    Those of compiled models inside count if the model holds one of its own, too.
    """
    held = [each for each in optimizers_of(model) if isinstance(each.optimizer, LossScaleOptimizer)]
    if not any(each.own for each in held):
        return {}
    found: dict[str, LossScaleOptimizer] = {}
    for each in held:
        found[unused("_".join(each.path), found)] = each.optimizer
    return found


def not_restored(model: keras.Model) -> str:
    """A sentence about a class whose models Keras loads without their optimizer, as those of keras-hub; else nothing.

    Keras compiles a loaded model as it was saved unless its class overrides `compile` and says nothing of loading.
    """
    kind = type(model)
    if kind.compile is keras.Model.compile or kind.compile_from_config is not keras.Model.compile_from_config:
        return ""
    return (
        f" {kind.__name__} overrides `compile`, so that Keras does not restore the optimizer from a .keras file. To go "
        "on with a saved run: compile(optimizer=hs.LossScaleOptimizer(...)), then "
        "optimizer.build(model.trainable_variables), then load_weights, which also reads a .keras file."
    )


def _parts(items: Iterable[tuple[Any, Any]], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The optimizers and layers among these values and in their lists and dicts, each with a name."""
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, keras.optimizers.Optimizer):
            yield name, value
        elif isinstance(value, keras.layers.Layer):
            yield value.name if prefix else name, value
        elif isinstance(value, dict):
            yield from _parts(value.items(), f"{name}_")
        elif isinstance(value, (list, tuple, set)):
            yield from _parts(enumerate(value), f"{name}_")
