"""What is known, while steps are traced or run eagerly, of how a loss scaler is used: to say what was forgotten."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import tensorflow as tf

from scaler.errors import ScaleWarning
from scaler.replicas import replica_count


class Use:
    """How one loss scaler was used so far in this process. It says each thing once.

    Attributes:
        asked: Whether anyone scaled, unscaled or read the scale.
        stepped: Whether it took part in a step, and was not only driven by events.
        read: Whether the scale was read outside of a tape since gradients were last scaled, so that they may carry it.
    """

    def __init__(self) -> None:
        self.asked = self.stepped = self.read = False
        self._said: set[str] = set()
        self._ended_in: Any = None

    def begins(self) -> None:
        """Something was scaled, unscaled or left to `update`: a step is open."""
        self.asked = self.stepped = True
        self._ended_in = None

    def ends(self) -> None:
        """The step was counted and the scale moved."""
        self._ended_in = _here()

    def ended_here(self) -> bool:
        """Whether the last thing done was to end a step, in the same graph, or in eager mode as now.

        Replicas are traced in turns, which nobody can tell from steps.
        """
        return self.stepped and self._ended_in is not None and self._ended_in == _here() and replica_count() == 1

    def say_once(self, sentence: str) -> None:
        """Warns, the first time this is said of this scaler."""
        if sentence not in self._said:
            self._said.add(sentence)
            warnings.warn(sentence, ScaleWarning, stacklevel=3)


def _here() -> Any:
    return "eager" if tf.executing_eagerly() else weakref.ref(tf.compat.v1.get_default_graph())
