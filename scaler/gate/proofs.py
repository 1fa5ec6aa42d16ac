"""How a step may commit, by selecting, in a branch or on trial: that depends on what is proven of its optimizers.

Here is which of them make no infinity and no NaN of finite gradients, and the proof for each.

The gate lets a step through when the squared global norm of its gradients is finite in float32, so that each value g of
them has |g| < 2^64 and g^2 is finite. What is shown for each class is that its slots stay finite, and that a weight
moves by less than 2^103 a step. That is less than half the distance between the two largest float32 numbers, so that a
finite weight stays finite, whatever it is.

Weight decay subtracts `weight * decay * rate`, which makes no weight larger as long as `0 <= decay * rate <= 2`. A step
with a weight decay and a negative rate is therefore skipped.

Averages of weights (EMA), and clipping by the optimizer to at most 2^63, keep values within those they are given.

Not proven, since they do make them: `Adagrad` and `Ftrl` add squares up without end. `RMSprop(centered=True)` takes the
root of a difference that rounding makes negative. `Adafactor` divides by row and column means that may be 0. The others
of Keras's optimizers, classes of users and functions are not known well enough. A constraint may return anything.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.graphs import has_gpu, in_xla
from scaler.backend.optimizers import UNKNOWN, learning_rate_source
from scaler.errors import InvalidArgument
from scaler.gate.optimizers import Optimizer, move_nothing, name_of

if TYPE_CHECKING:
    from scaler.gate.targets import Part, Targets

_LARGEST = 2.0**37
"""2^103 / 2^64, a factor of 2 for rounding, and another for a check that only tells rates apart by that."""
_BELOW_1 = 1 - 2.0**-20
"""Bias corrections divide by 1 - beta, which must not round to 0."""


def largest_learning_rate(optimizer: Optimizer, targets: Sequence, sum_duplicates: bool = True) -> float | None:
    """The learning rate up to which an update keeps finite values finite, or None: its new values are to be looked at.

    Args:
        optimizer: A Keras optimizer or a function `(grads, variables) -> None`.
        targets: The variables it is to move.
        sum_duplicates: Whether the optimizer is given the sum of an index's duplicates.
    """
    # An optimizer that works in 16 bits was asked for by name, with all it does.
    if any(replicas.native(target).dtype.size < 4 for target in targets):
        return float("inf")
    if not sum_duplicates:  # The proofs say nothing about an index that occurs several times.
        return None
    if optimizer is move_nothing:
        return float("inf")
    prove = _PROOFS.get(type(optimizer))
    constrained = any(getattr(target, "constraint", None) is not None for target in targets)
    if prove is None or not _is_plain(optimizer) or constrained:
        return None
    # The bounds below are those of float32.
    if any(tf.as_dtype(target.dtype) == tf.float64 for target in targets):
        return None
    decay = optimizer.weight_decay or 0.0
    rate = min(prove(optimizer), 1.0 / decay if decay > 0 else _LARGEST)
    # Where so little is proven that ordinary learning rates are beyond it, it is of no use.
    return rate if rate >= 1.0 and decay >= 0 else None


def _sgd(optimizer: Any) -> float:
    """The momentum is at most rate * |g| / (1 - momentum), and nesterov's step no more than it."""
    momentum = optimizer.momentum
    return _LARGEST * (1 - momentum) if 0 <= momentum <= _BELOW_1 else 0.0


def _adam(optimizer: Any) -> float:
    """|m| <= max |g|, and v <= max g^2 is not negative: m + (g - m) * (1 - beta) lies between m and g.

    A step is at most rate / (1 - beta_1) * |m| / epsilon.
    """
    betas = 0 <= optimizer.beta_1 <= _BELOW_1 and 2.0**-20 <= optimizer.beta_2 <= _BELOW_1
    return _LARGEST * (1 - optimizer.beta_1) * optimizer.epsilon if betas else 0.0


def _adamax(optimizer: Any) -> float:
    """As Adam, with u = max(beta_2 * u, |g|) in the place of v's root."""
    betas = 0 <= optimizer.beta_1 <= _BELOW_1 and 0 <= optimizer.beta_2 <= 1
    return _LARGEST * (1 - optimizer.beta_1) * optimizer.epsilon if betas else 0.0


def _nadam(optimizer: Any) -> float:
    """As Adam; m and g are each divided by at least 1 - beta_1, and v / (1 - beta_2^t) may only be too large."""
    return _adam(optimizer) / 2


def _lion(optimizer: Any) -> float:
    """|m| <= max |g|, and a step is the rate times a sign."""
    return _LARGEST if 0 <= optimizer.beta_1 <= 1 and 0 <= optimizer.beta_2 <= 1 else 0.0


def _rmsprop(optimizer: Any) -> float:
    """Its v = rho * v + (1 - rho) * g^2 is not negative.

    Nor is it larger than max g^2, where the two factors add up to no more than 1 in float32. A step is at most
    rate * |g| / sqrt(epsilon) / (1 - momentum).
    """
    rho, momentum = optimizer.rho, optimizer.momentum
    average = 0 <= rho <= 1 and float(np.float32(rho)) + float(np.float32(1 - rho)) <= 1
    if optimizer.centered or not average or not 0 <= momentum <= _BELOW_1:
        return 0.0
    return _LARGEST * max(optimizer.epsilon, 0.0) ** 0.5 * (1 - momentum)


_PROOFS: dict[type, Callable[[Any], float]] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
    keras.optimizers.Adamax: _adamax,
    keras.optimizers.Nadam: _nadam,
    keras.optimizers.Lion: _lion,
    keras.optimizers.RMSprop: _rmsprop,
}
"""By the very class: what a subclass does is its own."""


def _is_plain(optimizer: Any) -> bool:
    """Whether it has constant numbers, a learning rate that may be read twice, and does nothing else to gradients."""
    names = ("momentum", "beta_1", "beta_2", "rho", "epsilon", "weight_decay")
    given = [getattr(optimizer, name, None) for name in names]
    if not all(value is None or isinstance(value, numbers.Real) for value in given):
        return False
    rate = learning_rate_source(optimizer)
    # A function of the user's may count its calls.
    schedules = (keras.optimizers.schedules.LearningRateSchedule, keras.Variable)
    called = rate is UNKNOWN or (callable(rate) and not isinstance(rate, schedules))
    # Clipping multiplies by its limit before it divides by the norm.
    limits = [limit for limit in (optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue) if limit]
    known = all(isinstance(limit, (int, float, np.number)) and 0 < limit <= 2.0**63 for limit in limits)
    return known and not called and not optimizer.gradient_accumulation_steps


SMALL = 2**16
"""Elements of all variables of a step together. Copies of as many stay in a core's cache."""


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
