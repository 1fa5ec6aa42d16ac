"""Chooses how a step moves its variables, and how a move that ends in a NaN or an infinity is kept from counting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.devices import has_gpu
from scaler.backend.graphs import in_xla
from scaler.errors import InvalidArgument
from scaler.gate.grouped import Grouped, grouped
from scaler.gate.joined import Joined
from scaler.gate.joined_on_replicas import JoinedOnReplicas, joined_on_replicas
from scaler.gate.optimizers import move_nothing, name_of, variables_of
from scaler.gate.plain import Plain
from scaler.gate.proofs import largest_learning_rate
from scaler.gate.targets import Targets
from scaler.gate.transaction import Proven, Transaction
from scaler.gradients.clipping import Clipping

Update: TypeAlias = Plain | Grouped | JoinedOnReplicas
"""Its `move(grads, loss_scale, limit)` unscales and clips the gradients, moves the variables and rounds masters."""
Attempt: TypeAlias = Proven | Transaction
"""Runs an update where the gradients are sound, and says whether it counts: see the two classes."""


def choose_update(targets: Targets, grads: Sequence, clip: Clipping | None, joined: Joined) -> Update:
    """An update in groups where one is possible and faster, else a plain one. Both compute the same, but for last bits.

    Args:
        targets: What the update moves.
        grads: The scaled gradients it will be given.
        clip: How unscaled gradients are limited, or None.
        joined: The same gradients side by side.
    """
    several = tf.distribute.has_strategy()
    in_groups = (joined_on_replicas if several else grouped)(targets, grads, clip, joined)
    return in_groups or Plain(targets.optimizer, targets.updated, targets.masters)


def choose_attempt(strategy: Any, targets: Targets, sum_duplicates: bool) -> Attempt:
    """No look at the new values where they are proven to stay finite, else a look and a way back.

    Args:
        strategy: TensorFlow's, from what `replicas.merge` calls.
        targets: What the update moves.
        sum_duplicates: Whether the optimizer is given the sum of an index's duplicates.
    """
    rate = _proven_up_to(targets, sum_duplicates)
    if rate is not None:
        return Proven(targets.optimizer, rate)
    masters = (*targets.masters.model_variables, *targets.masters.variables) if targets.masters else ()
    kept = [*targets.known, *variables_of(targets.optimizer), *masters]
    looked_at, count = [*targets.updated, *targets.own_values], len(targets.known)
    indices = [*targets.positions, *range(count, count + len(targets.own_values))]
    return Transaction(strategy, targets.optimizer, kept, looked_at, indices)


def check_select(select: object) -> None:
    """Refuses what is not a Python bool, and not None."""
    if select is not None and not isinstance(select, bool):
        raise InvalidArgument(
            f"LossScaler(select={select!r} ({type(select).__name__})): expected True or False, or None, which selects "
            "on a GPU and under XLA, and branches elsewhere."
        )


def selects(asked: bool | None, targets: Targets, sum_duplicates: bool) -> bool:
    """Whether the step chooses every new value by its decision, and takes no branch.

    Args:
        asked: `LossScaler(select=...)`.
        targets: What the update moves.
        sum_duplicates: Whether the optimizer is given the sum of an index's duplicates.

    Raises:
        InvalidArgument: If it is asked for, and the optimizer may make values that are not finite, or is not Keras's.
    """
    if tf.executing_eagerly() or asked is False:
        return False
    optimizer = targets.optimizer
    known = optimizer is move_nothing or isinstance(optimizer, keras.optimizers.Optimizer)
    fits = known and _proven_up_to(targets, sum_duplicates) is not None
    if asked and not fits:
        raise InvalidArgument(
            f"apply: LossScaler(select=True) with {name_of(optimizer)}: its update has to be looked at before it "
            "counts, which takes a branch. Expected SGD, Adam, AdamW, Adamax, Nadam, Lion or plain RMSprop of Keras, "
            "with a learning rate that is a number or a schedule, an epsilon of its default's size, and without "
            "gradient_accumulation_steps and constraints, for variables of float32 or with masters, and "
            "sum_duplicates=True; or select=None, which branches where it has to."
        )
    return fits and (bool(asked) or selects_by_default())


def selects_here(asked: bool | None) -> bool:
    """Whether steps that are traced now choose their new values, where the optimizer allows it."""
    if tf.executing_eagerly():
        return False
    return selects_by_default() if asked is None else asked


def selects_by_default() -> bool:
    """Whether a step that is traced here selects by default: on a GPU, and where XLA compiles the step.

    Elsewhere a branch costs nothing, since the host takes the decision anyway. XLA fuses less across a branch.
    """
    return has_gpu() or in_xla()


def _proven_up_to(targets: Targets, sum_duplicates: bool) -> float | None:
    """The learning rate up to which new values are proven to stay finite, or None."""
    # An optimizer that works in 16 bits was asked for by name, with all it does.
    if any(replicas.native(target).dtype.size < 4 for target in targets.updated):
        return float("inf")
    # The proofs say nothing about an index that occurs several times.
    return largest_learning_rate(targets.optimizer, targets.updated) if sum_duplicates else None
