"""Masters that change outside of a step, for example by `keras.callbacks.SwapEMAWeights`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from scaler.backend.optimizers import built_for, have_it_go_through
from scaler.weights.masters import MasterWeights


class Followed(list):
    """An optimizer's list of variables, with masters among them. An iteration between two steps also updates the model.

    Keras's callback iterates over the list and swaps each variable with its average. It does not know the model's own
    16-bit variables. So masters and model are synchronised before the first swap, and the model is written after the
    last one.
    """

    def __init__(self, variables: list, masters: MasterWeights, strategy: tf.distribute.Strategy):
        super().__init__(variables)
        self._masters, self._strategy = masters, strategy

    def __iter__(self) -> Iterator:
        """Iterates as any list does. Between two steps it also makes model and masters agree, before and after."""
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
    """Makes the model follow the masters of an optimizer, and of the optimizers inside a MultiOptimizer."""
    for each in (inner, *getattr(inner, "optimizers", ())):
        have_it_go_through(each, Followed(built_for(each) or [], masters, strategy))
