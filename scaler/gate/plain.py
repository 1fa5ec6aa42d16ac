"""An update by the optimizer itself, operation by operation, on any number of replicas."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from scaler import gradients
from scaler.backend import apply_steps, replicas
from scaler.backend.autograph import as_called
from scaler.backend.iterations import read_once_a_device
from scaler.backend.keras_two import KerasTwo
from scaler.gate.optimizers import Optimizer
from scaler.gate.targets import model_follows
from scaler.gate.unscale_and_clip import finish_all
from scaler.gradients.clipping import Limiter
from scaler.weights.masters import MasterWeights


@dataclasses.dataclass(frozen=True)
class Plain:
    """An optimizer moves variables, in a graph or in eager mode.

    Attributes:
        optimizer: A Keras optimizer or a function `(grads, variables) -> None`.
        variables: One for each gradient.
        masters: What the variables are masters for, or None.
    """

    optimizer: Optimizer
    variables: Sequence
    masters: MasterWeights | None

    def move(self, grads: Sequence, loss_scale: tf.Tensor, limit: Limiter | None) -> None:
        """Moves the variables on every replica.

        Args:
            grads: Scaled gradients of any floating dtype, summed over the replicas.
            loss_scale: Scalar float32, what they are divided by.
            limit: Clips unscaled gradients, or None.
        """
        calls = 0

        def update(own: list) -> None:
            nonlocal calls
            calls += 1
            _call(self.optimizer, finish_all(own, self.variables, loss_scale, limit), self.variables)

        with model_follows(self.masters), gradients_are_reduced(self.optimizer) as sums:
            replicas.each(tf.distribute.get_strategy(), update, grads)
            if not all(map(gradients.overwrites, self.variables)):
                check_not_summed_again(sums, calls)


def _call(optimizer: Optimizer, grads: list, variables: Sequence) -> None:
    """Every replica calls this, with the same gradients."""
    if isinstance(optimizer, keras.optimizers.Optimizer):
        with read_once_a_device(optimizer):
            optimizer.apply(grads, variables)
    elif isinstance(optimizer, KerasTwo):
        optimizer.apply(grads, variables)
    else:
        update = optimizer.apply if hasattr(optimizer, "apply") else optimizer
        as_called(update)(grads, [replicas.own_component(variable) for variable in variables])


@contextlib.contextmanager
def gradients_are_reduced(optimizer: Optimizer) -> Iterator[list[Counter[str]]]:
    """Keeps a Keras optimizer from summing gradients over replicas that were summed already.

    Keras 3 has no argument for this. On one replica the sum changes nothing, but a step that contains it cannot be
    exported as a SavedModel. Gradients divided by the number of replicas first would be clipped wrongly by the
    optimizer's own clipping. Any other optimizer is a function of the gradients it is given.

    Yields:
        The calls of the step that sums: of the optimizer, or of each of those that a MultiOptimizer has do the work.

    Raises:
        UnsupportedVersion: If a release of Keras has no step to take over for it, on several replicas.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        yield []
        return
    with contextlib.ExitStack() as stack:
        sums = []
        for each in (optimizer, *getattr(optimizer, "optimizers", ())):
            if replicas.replica_count() > 1 or not apply_steps.missing(each, apply_steps.SUM):
                sums.append(stack.enter_context(apply_steps.taken_over(each, **{apply_steps.SUM: lambda pairs: pairs})))
        yield sums


def check_not_summed_again(sums: list[Counter[str]], times: int) -> None:
    """Refuses an optimizer that may have summed over the replicas by another step than the one that was taken over.

    Args:
        sums: From `gradients_are_reduced`.
        times: How many replicas have called `apply`.

    Raises:
        UnsupportedVersion: If none of the optimizers, or one of them not on every replica, has called that step.
    """
    if replicas.replica_count() == 1 or not sums:
        return
    called = [calls for calls in sums if calls] or sums[:1]
    for calls in called:
        apply_steps.check_called_once(calls, apply_steps.SUM, times)
