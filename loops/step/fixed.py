"""What the trace of a step has fixed, so that a change afterwards is refused and not ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import keras

import scaler
from loops.backend.variables import layers_now

if TYPE_CHECKING:
    from loops.step.composed_step import ComposedStep
    from loops.step.train_step import TrainStep

_SETTINGS = ("optimizer", "loss_fn", "loss_scaler", "clip_norm", "clip", "windows", "last_window", "retry")
_COMPOSED = ("parts", "forward", "loss_scaler", "accumulate", "retry", "scalers", "optimizers")


_Parts = dict[str, tuple]
"""What a step is made of, by name: objects, which stay alive so that no other one gets their place, and numbers."""


def keep_fixed(step: TrainStep) -> None:
    """Refuses changes of a step's settings and of its model's layers at later calls of the function being traced.

    Raises:
        scaler.InvalidArgument: With what was changed.
    """

    def look() -> _Parts:
        return {"the model's layers": _layers([step.model]), **_settings(step, _SETTINGS)}

    _keep(f"TrainStep of model {step.model.name!r}", "TrainStep", look, step)


class ComposedFixed:
    """What a `ComposedStep` may not change: its settings once it is made, the layers of its models once it is traced.

    Args:
        step: The step, with all attributes.
    """

    def __init__(self, step: ComposedStep) -> None:
        self._step, self._made = step, _settings(step, _COMPOSED)

    def keep(self) -> None:
        """Refuses changes, now and at later calls of the function being traced.

        Raises:
            scaler.InvalidArgument: With what was changed.
        """
        who = f"ComposedStep of {', '.join(self._step.scalers)}"
        changed = _changed(_known(_settings(self._step, _COMPOSED)), self._made)
        if changed:
            raise scaler.InvalidArgument(
                f"{who}: changed since it was made: {changed}. Its parts would go on with what they were made with. "
                "Make a new ComposedStep."
            )
        _keep(who, "ComposedStep", self._look, self._step)

    def _look(self) -> _Parts:
        parts = self._made["parts"]
        layers = {f"the layers of part {part.name!r}": _layers(part.own_models) for part in parts}
        own = [part.own_models for part in parts]
        known = {id(one) for each in (*own, *layers.values()) for one in each}
        others = _layers(model for model in self._step.models if id(model) not in known)
        layers["the layers of other models"] = tuple(layer for layer in others if id(layer) not in known)
        return {**layers, **_settings(self._step, _COMPOSED)}


def _keep(who: str, kind: str, look: Callable[[], _Parts], step: object) -> None:
    traced = look()

    def check(now: _Parts) -> None:
        changed = _changed(now, traced)
        if changed:
            raise scaler.InvalidArgument(
                f"{who}: changed since it was traced: {changed}. Its compiled function would go on with what it was "
                f"traced with. Make a new {kind}, and a new Loop or tf.function around it."
            )

    scaler.authoring.at_each_call(lambda: _known(look()), check, ("fixed", id(step)))


def _changed(now: _Parts, before: _Parts) -> str:
    """The names of what is not the same any more. `now` is as `_known` returns it."""
    return ", ".join(name for name, value in _known(before).items() if value != now.get(name))


def _known(parts: _Parts) -> _Parts:
    """What is comparable: objects by their ids, and numbers."""
    return {
        name: tuple(one if isinstance(one, (int, float)) else id(one) for one in own) for name, own in parts.items()
    }


def _layers(models: Iterable[keras.layers.Layer]) -> tuple:
    return tuple(layer for model in models for layer in layers_now(model))


def _settings(step: object, names: Iterable[str]) -> _Parts:
    return {name: _as_tuple(getattr(step, name)) for name in names}


def _as_tuple(setting: Any) -> tuple:
    if isinstance(setting, dict):
        return tuple(setting.values())
    return tuple(setting) if isinstance(setting, (list, tuple)) else (setting,)
