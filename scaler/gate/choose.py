"""Chooses how a step commits: by selecting its new values, or in a branch."""

from __future__ import annotations

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.graphs import has_gpu, in_xla
from scaler.errors import InvalidArgument
from scaler.gate.optimizers import move_nothing, name_of
from scaler.gate.targets import Part, Targets

SMALL = 2**16
"""Elements of all variables of a step together. Copies of as many stay in a core's cache."""


def check_select(select: object) -> None:
    """Refuses what is not a Python bool, and not None."""
    if select is not None and not isinstance(select, bool):
        raise InvalidArgument(
            f"LossScaler(select={select!r} ({type(select).__name__})): expected True or False, or None, which selects "
            "on a GPU and under XLA, and branches elsewhere."
        )


def selects(asked: bool | None, targets: Targets) -> bool:
    """Whether the step chooses every new value by its decision, and takes no branch.

    Args:
        asked: `LossScaler(select=...)`.
        targets: What the update moves.

    Raises:
        InvalidArgument: If it is asked for, and an optimizer may make values that are not finite, or is not Keras's.
    """
    if tf.executing_eagerly() or asked is False:
        return False
    unfit = _unfit(targets)
    if asked and unfit:
        raise InvalidArgument(
            f"apply: LossScaler(select=True) with {name_of(unfit[0])}: its update has to be looked at before it "
            "counts, which takes a branch. Expected SGD, Adam, AdamW, Adamax, Nadam, Lion or plain RMSprop of Keras, "
            "with a learning rate that is a number or a schedule, an epsilon of its default's size, and without "
            "gradient_accumulation_steps and constraints, for variables of float32 or with masters, and "
            "sum_duplicates=True; or select=None, which branches where it has to."
        )
    return not unfit and (bool(asked) or selects_by_default())


def moves_by_selecting(asked: bool | None, targets: Targets) -> bool:
    """Whether a step branches for what a skip needs alone, and selects its new values all the same.

    That is faster where the branch would take longer than the update in it. In a large step all new values would wait
    for the decision together.

    Args:
        asked: `LossScaler(select=...)`.
        targets: What the update moves.
    """
    if asked is not None or tf.executing_eagerly() or tf.distribute.has_strategy() or _unfit(targets):
        return False
    sizes = [replicas.native(variable).shape.num_elements() for variable in targets.built_for]
    return None not in sizes and sum(sizes) <= SMALL


def selects_here(asked: bool | None) -> bool:
    """Whether steps that are traced now choose their new values, where the optimizer allows it."""
    if tf.executing_eagerly():
        return False
    return selects_by_default() if asked is None else asked


def selects_by_default() -> bool:
    """Whether a step that is traced here selects by default: on a GPU, and where XLA compiles the step.

    Elsewhere the host takes the decision anyway, so that a large update may as well stand in a branch. XLA fuses less
    across one.
    """
    return has_gpu() or in_xla()


def needs_trial(targets: Targets) -> bool:
    """Whether the update has to be tried: its new values are not proven to be finite, or it may stop halfway.

    In eager mode an optimizer may end in an error when others have moved.
    """
    proven = all(part.proven is not None for part in targets.parts)
    return not proven or (len(targets.parts) > 1 and tf.executing_eagerly())


def _unfit(targets: Targets) -> list:
    """The optimizers that may make values that are not finite, or are not Keras's."""

    def fits(part: Part) -> bool:
        known = part.optimizer is move_nothing or isinstance(part.optimizer, keras.optimizers.Optimizer)
        return known and part.proven is not None

    return [part.optimizer for part in targets.parts if not fits(part)]
