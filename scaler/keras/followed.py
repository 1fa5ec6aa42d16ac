"""Masters that something outside of a step gives other values, such as `keras.callbacks.SwapEMAWeights`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from scaler.backend.optimizers import built_for, have_it_go_through
from scaler.weights.masters import MasterWeights


class Followed(list):
    """An optimizer's variables, masters among them. The model follows when they are gone through between two steps.

    Keras's callback swaps them with their averages, one after the other, and knows nothing of the model's own 16-bit
    variables. So these are taken over before, and written after the last.
    """

    def __init__(self, variables: list, masters: MasterWeights, strategy: tf.distribute.Strategy):
        super().__init__(variables)
        self._masters, self._strategy = masters, strategy

    def __iter__(self) -> Iterator:
        """As of any list; between two steps, around that, the model and the masters are made to agree."""
        if not tf.executing_eagerly() or self._masters.in_update:
            return super().__iter__()
        return self._around(super().__iter__())

    def _around(self, variables: Iterator) -> Iterator:
        with self._scope():
            self._masters.refresh(self[:])
            self._masters.write(self[:])
        yield from variables
        with self._scope():
            self._masters.write(self[:])

    def _scope(self) -> Any:
        inside = self._strategy is tf.distribute.get_strategy()
        return contextlib.nullcontext() if inside else self._strategy.scope()


def follow(inner: Any, masters: MasterWeights, strategy: tf.distribute.Strategy) -> None:
    """Has the model follow the masters of an optimizer, and of those inside of a MultiOptimizer."""
    for each in (inner, *getattr(inner, "optimizers", ())):
        have_it_go_through(each, Followed(built_for(each) or [], masters, strategy))
