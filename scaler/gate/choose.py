"""Chooses how a step moves its variables, and how a move that ends in a NaN or an infinity is kept from counting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from scaler.backend import replicas
from scaler.gate.grouped import Grouped, grouped
from scaler.gate.optimizers import variables_of
from scaler.gate.plain import Plain
from scaler.gate.proofs import largest_learning_rate
from scaler.gate.targets import Targets
from scaler.gate.transaction import Proven, Transaction
from scaler.gradients.clipping import Clipping

Update: TypeAlias = Plain | Grouped
"""Its `move(grads, loss_scale, limit)` unscales and clips the gradients, moves the variables and rounds masters."""
Attempt: TypeAlias = Proven | Transaction
"""Runs an update where the gradients are sound, and says whether it counts: see the two classes."""


def choose_update(targets: Targets, grads: Sequence, clip: Clipping | None) -> Update:
    """An update in groups where one is possible and faster, else a plain one. Both compute the same, but for last bits.

    Args:
        targets: What the update moves.
        grads: The scaled gradients it will be given.
        clip: How unscaled gradients are limited, or None.
    """
    return grouped(targets, grads, clip) or Plain(targets.optimizer, targets.updated, targets.masters)


def choose_attempt(strategy: Any, targets: Targets, sum_duplicates: bool) -> Attempt:
    """No look at the new values where they are proven to stay finite, else a look and a way back.

    Args:
        strategy: TensorFlow's, from what `replicas.merge` calls.
        targets: What the update moves.
        sum_duplicates: Whether the optimizer is given the sum of an index's duplicates.
    """
    # An optimizer that works in 16 bits was asked for by name, with all it does.
    unsafe = any(replicas.native(target).dtype.size < 4 for target in targets.updated)
    rate = float("inf") if unsafe else largest_learning_rate(targets.optimizer, targets.updated)
    # The proofs say nothing about an index that occurs several times.
    if rate is not None and (sum_duplicates or unsafe):
        return Proven(targets.optimizer, rate)
    masters = (*targets.masters.model_variables, *targets.masters.variables) if targets.masters else ()
    kept = [*targets.known, *variables_of(targets.optimizer), *masters]
    looked_at, count = [*targets.updated, *targets.own_values], len(targets.known)
    indices = [*targets.positions, *range(count, count + len(targets.own_values))]
    return Transaction(strategy, targets.optimizer, kept, looked_at, indices)
