"""The state of a run's actions, and which action takes which when a run goes on.

An action is known again by the file or folder that it writes, or by its name, and only without either by its order
among those of its class.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import scaler
from loops.support.errors import CheckpointError, ResumeWarning
from loops.support.written import named, place_of

_KEYS = "action_keys"


class ActionStates:
    """Saves what actions return from `save_state()`, and gives it to their `load_state(value)`.

    An action whose state a checkpoint does not have is told by `load_no_state(step)`, if it has that; otherwise a
    `ResumeWarning` says that it starts new. Its attribute `state_keys`, a list of strings from exact to loose, says
    what it is known by, where that is neither what it writes nor its `name`. Actions that share a state have it as
    their attribute `state_of`.

    Args:
        actions: Those without a state are passed over.
        folder: Of the checkpoints. Paths relative to it stay the same where a run's folder is moved.
    """

    def __init__(self, actions: Iterable, folder: pathlib.Path):
        self._folder = folder
        self._actions: dict[str, Any] = {}
        counts: dict[str, int] = {}
        for action in actions:
            if hasattr(action, "save_state") and hasattr(action, "load_state"):
                kind = type(action).__qualname__
                counts[kind] = counts.get(kind, 0) + 1
                self._actions[kind if counts[kind] == 1 else f"{kind} {counts[kind]}"] = action

    def save(self) -> dict[str, Any]:
        """All states and what their actions are known by, as facts of a checkpoint."""
        return {
            "actions": {label: action.save_state() for label, action in self._actions.items()},
            _KEYS: self._keys(),
        }

    def restore(self, path: str, facts: Mapping, step: int) -> None:
        """Gives each action its state.

        Args:
            path: Of the checkpoint.
            facts: Its facts.
            step: That it was saved at.

        Raises:
            CheckpointError: If an action cannot take its state.
        """
        saved, keys = facts["actions"], self._keys()
        taken = _matched(keys, facts[_KEYS])
        loaded = {id(_state_of(self._actions[label])) for label in taken}
        for label, action in self._actions.items():
            with named(action):
                if label in taken:
                    with _its_state(path, label):
                        action.load_state(saved[taken[label]])
                elif hasattr(action, "load_no_state"):
                    action.load_no_state(step)
                elif id(_state_of(action)) not in loaded:
                    loaded.add(id(_state_of(action)))
                    _warn_of_new(path, label, keys[label])
        _warn_of_order(path, keys, facts[_KEYS])

    def _keys(self) -> dict[str, list[str]]:
        return {label: self._keys_of(action) for label, action in self._actions.items()}

    def _keys_of(self, action: Any) -> list[str]:
        keys = getattr(action, "state_keys", None)
        if keys is not None:
            return list(keys)
        if place := place_of(action):
            absolute = os.path.abspath(place.path)
            return [absolute, os.path.relpath(absolute, os.path.abspath(self._folder))]
        name = getattr(action, "name", None)
        return [name] if isinstance(name, str) else []


@contextlib.contextmanager
def _its_state(path: str, label: str) -> Iterator[None]:
    """Turns what goes wrong with a state of another form into one sentence."""
    try:
        yield
    except scaler.ScalerError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{path}: {_short(label)} cannot take the state that was saved for it ({type(error).__name__}: {error})."
        ) from error


def _matched(here: Mapping[str, list[str]], saved: Mapping[str, list[str]]) -> dict[str, str]:
    """Whose state each takes: first those known exactly, then by looser keys, and by order among equal ones."""

    def key(label: str, keys: list[str], level: int) -> tuple | None:
        keys = keys or [""]
        return (_class(label), keys[level]) if level < len(keys) else None

    taken: dict[str, str] = {}
    free = dict(saved)
    for level in range(max((len(keys) for keys in here.values()), default=0) or 1):
        for label, keys in here.items():
            wanted = None if label in taken else key(label, keys, level)
            alike = (other for other, its in free.items() if wanted and key(other, its, level) == wanted)
            if other := next(alike, None):
                taken[label] = other
                del free[other]
    return taken


def _state_of(action: Any) -> Any:
    return getattr(action, "state_of", action)


def _class(label: str) -> str:
    return label.split(" ")[0]


def _short(label: str) -> str:
    return _class(label).rpartition(".")[2]


def _warn_of_new(path: str, label: str, keys: list[str]) -> None:
    known = f" {keys[-1]!r}" if keys else ""
    warnings.warn(
        f"{path} has no state of {_short(label)}{known}: it starts new. An action takes the state of the one that had "
        "the same name, or wrote the same file, when it was saved.",
        ResumeWarning,
        stacklevel=5,
    )


def _warn_of_order(path: str, here: Mapping[str, list[str]], saved: Mapping[str, list[str]]) -> None:
    """Where there are more or fewer actions that only their order tells apart."""
    for kind in dict.fromkeys(_class(label) for label, keys in here.items() if not keys):
        now, then = (sum(_class(label) == kind and not keys for label, keys in each.items()) for each in (here, saved))
        if then != now and then:
            warnings.warn(
                f"{path} has the state of {then} {_short(kind)}, and this run has {now}: each takes that of the one in "
                "its place. Give each an attribute `name`, by which it is known.",
                ResumeWarning,
                stacklevel=5,
            )
