"""An optimizer's update compiled by XLA, a few variables to a call.

Unscaling, clipping, weight decay, the update and the rounding of masters become a few passes over memory, where
TensorFlow's graph takes one pass for each operation. Whether it is worth it depends on the variables' sizes. The result
is that of the optimizer's own `apply`, except for the last bits, which XLA rounds differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_HANDLE = 2**12
"""What a variable costs beside its elements, in elements: each is read through a handle, however small it is."""
_WORTH_COMPILING = 2**18
_MOST = 4
"""Calls of one update. More calls than cores run no faster, and the launch of a call for each variable takes longer
than its work."""


def worth_compiling(variables: Sequence) -> bool:
    """Whether these variables are updated faster in compiled calls than one by one in the graph."""
    return sum(map(_cost, variables)) >= _WORTH_COMPILING


def balanced(pairs: Sequence[tuple]) -> list[list[tuple]]:
    """The pairs of gradient and variable in a few groups of about the same cost."""
    count = max(1, min(_MOST, sum(_cost(variable) for _, variable in pairs) // _WORTH_COMPILING))
    groups: list[list[tuple]] = [[] for _ in range(count)]
    costs = [0] * count
    for pair in sorted(pairs, key=lambda pair: _cost(pair[1]), reverse=True):
        cheapest = costs.index(min(costs))
        groups[cheapest].append(pair)
        costs[cheapest] += _cost(pair[1])
    return [group for group in groups if group]


def in_one_call(move: Callable[..., None], grads: Sequence, variables: Sequence, learning_rate: tf.Tensor) -> None:
    """Calls `move(grads, variables, learning_rate)` compiled."""

    @tf.function(jit_compile=True, autograph=False)
    def compiled_update(grads: list, learning_rate: tf.Tensor) -> None:
        move(grads, variables, learning_rate)

    compiled_update(list(grads), learning_rate)


def _cost(variable: Any) -> int:
    return variable.shape.num_elements() + _HANDLE
