"""What the trace of a step has fixed, so that a change afterwards is refused and not ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras

import scaler
from loops.backend.variables import layers_now

_Fixed = dict[str, tuple]
"""What a step is made of, by name: objects, which stay alive so that no other one gets their place, and numbers."""


class Fixed:
    """What a step may not change once it is traced: its settings, and the layers of its models.

    Args:
        step: The step, with all attributes.
        settings: The names of those that count.
        layers: Returns the layers of its models as they are now, by what to call them.
    """

    def __init__(self, step: object, settings: Iterable[str], layers: Callable[[], _Fixed]) -> None:
        self._step, self._settings, self._layers = step, tuple(settings), layers
        self._made = self._settings_now()

    def changed_since_made(self) -> str:
        """The names of settings that are not as they were when this was made."""
        return ", ".join(_changes(_identities(self._settings_now()), self._made))

    def keep(self, who: str) -> None:
        """Refuses changes at later calls of the function that is being traced.

        Args:
            who: The class and name of the step, for the sentence.

        Raises:
            scaler.InvalidArgument: With what was changed.
        """
        traced, kind = self._now(), who.partition(" ")[0]

        def check(_: tuple[int, ...]) -> None:
            changes = _changes(_identities(self._now()), traced)
            if changes:
                raise scaler.InvalidArgument(
                    f"{who}: changed since it was traced: {', '.join(changes)}. Its compiled function would go on with "
                    f"what it was traced with. Make a new {kind}, and a new Loop or tf.function around it."
                )

        scaler.authoring.at_each_call(self._ids, check, ("fixed", id(self._step)))

    def _ids(self) -> tuple[int, ...]:
        """The ids of all that counts: quick to ask for before each call. An equal number may have another one."""
        own = [_as_tuple(getattr(self._step, name)) for name in self._settings]
        return tuple([id(one) for parts in (*self._layers().values(), *own) for one in parts])

    def _now(self) -> _Fixed:
        return {**self._layers(), **self._settings_now()}

    def _settings_now(self) -> _Fixed:
        return {name: _as_tuple(getattr(self._step, name)) for name in self._settings}


def layers_in(models: Iterable[keras.layers.Layer]) -> tuple:
    """Models and the layers in them now."""
    return tuple(layer for model in models for layer in layers_now(model))


def _changes(now: _Fixed, before: _Fixed) -> list[str]:
    """The names of what is not the same any more. `now` is as `_identities` returns it."""
    return [name for name, value in _identities(before).items() if value != now.get(name)]


def _identities(parts: _Fixed) -> _Fixed:
    """What is comparable: objects by their ids, and numbers."""
    return {
        name: tuple(one if isinstance(one, (int, float)) else id(one) for one in own) for name, own in parts.items()
    }


def _as_tuple(setting: Any) -> tuple:
    if isinstance(setting, dict):
        return tuple(setting.values())
    return tuple(setting) if isinstance(setting, (list, tuple)) else (setting,)
