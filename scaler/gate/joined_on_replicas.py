"""Small variables are updated as a few large ones on every replica, each of its own copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from scaler import gradients
from scaler.backend import apply_steps, replicas
from scaler.backend.graphs import in_xla
from scaler.backend.iterations import read_once, read_once_a_device
from scaler.gate import joined
from scaler.gate.optimizers import Optimizer, variables_of
from scaler.gate.targets import Targets, model_follows
from scaler.gate.unscale_and_clip import finish_one
from scaler.gradients.clipping import Clipping, Limiter
from scaler.weights.masters import MasterWeights


@dataclasses.dataclass(frozen=True)
class JoinedOnReplicas:
    """A Keras optimizer moves the copies of variables on all replicas, small ones joined, inside a graph.

    Attributes:
        optimizer: It was built for the variables.
        variables: One for each gradient.
        masters: What the variables are masters for, or None.
        chunks: The variables that are joined, each chunk with its scaled gradients on every replica.
    """

    optimizer: Optimizer
    variables: Sequence
    masters: MasterWeights | None
    chunks: Sequence[tuple[joined.Chunk, Any]]

    def move(self, grads: Sequence, loss_scale: tf.Tensor, limit: Limiter | None) -> None:
        """Moves the variables on every replica, as `Plain.move` does."""
        optimizer, variables = self.optimizer, self.variables
        in_chunks = {place for chunk, _ in self.chunks for place in chunk.places}
        others = [variable for place, variable in enumerate(variables) if place not in in_chunks]
        alone = {id(replicas.native(variable)) for variable in others}
        replicas_seen = 0

        def update(own: list) -> None:
            nonlocal replicas_seen
            replicas_seen += 1
            ready = [
                grad if place in in_chunks else finish_one(grad, loss_scale, limit, place)
                for place, grad in enumerate(own)
            ]
            optimizer.apply(ready, list(variables))

        def step(strategy: Any, pairs: Sequence[tuple], learning_rate: Any) -> None:
            replicas.each(strategy, move_chunks, learning_rate, [grad for _, grad in self.chunks])
            rest = [pair for pair in pairs if id(replicas.native(pair[1])) in alone]
            with read_once_a_device(optimizer):
                getattr(type(optimizer), apply_steps.UPDATE)(optimizer, strategy, rest, learning_rate)

        def move_chunks(learning_rate: Any, wholes: list) -> None:
            rate = tf.convert_to_tensor(learning_rate)
            with read_once(optimizer):
                for (chunk, _), whole in zip(self.chunks, wholes, strict=True):
                    grad = finish_one(whole, loss_scale, limit, None)
                    joined.move(optimizer, chunk, grad, variables, self.masters, rate)

        def decay(given: Sequence) -> None:
            own = [variable for variable in given if id(replicas.native(variable)) in alone]
            getattr(type(optimizer), apply_steps.DECAY)(optimizer, own)

        done: dict[str, Callable] = {
            apply_steps.SUM: lambda pairs: pairs,
            apply_steps.UPDATE: step,
            apply_steps.DECAY: decay,
        }
        with model_follows(self.masters, others), apply_steps.taken_over(optimizer, **done) as calls:
            replicas.each(tf.distribute.get_strategy(), update, grads)
        apply_steps.check_called_once(calls, apply_steps.SUM, replicas_seen)
        apply_steps.check_called_once(calls, apply_steps.UPDATE)
        if optimizer.weight_decay:
            apply_steps.check_called_once(calls, apply_steps.DECAY, replicas_seen)
        if self.masters and joined.moves_masters_after_the_step(optimizer, variables):
            self.masters.write()


def joined_on_replicas(
    targets: Targets, grads: Sequence, clip: Clipping | None, together: joined.Joined
) -> JoinedOnReplicas | None:
    """The update with small variables joined, or None where none are, or the optimizer has to be left as it is.

    Args:
        targets: What the update moves.
        grads: The scaled gradients it will be given, on every replica.
        clip: How unscaled gradients are limited, or None.
        together: The same gradients side by side.
    """
    optimizer, variables, masters = targets.optimizer, targets.updated, targets.masters
    if tf.executing_eagerly() or in_xla() or not _has_copies(targets):
        return None
    if apply_steps.missing(optimizer, apply_steps.SUM):
        return None  # Which the plain update refuses.
    if not joined.leaves_gradients_alone(optimizer) or not (masters is None or masters.compiles):
        return None
    # A new value in place of a gradient is neither divided nor limited.
    if any(map(gradients.overwrites, variables)):
        return None
    # A joined gradient has no position by which to limit it.
    if clip is not None and not clip.limits_all_alike:
        return None
    first = [replicas.of_each(tf.distribute.get_strategy(), grad)[0] for grad in grads]
    # Keras decays weights in a merge call, which the replicas cannot make one after another.
    chunks = [chunk for chunk in joined.chunks_of(optimizer, first, variables, masters) if not chunk.decaying]
    with_grads = [(chunk, together.at(chunk.places)) for chunk in chunks]
    return JoinedOnReplicas(optimizer, variables, masters, with_grads) if chunks else None


def _has_copies(targets: Targets) -> bool:
    """Whether each replica of this process has copies of its own of all variables, each of them given once."""
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)):
        return False
    model = targets.masters.model_variables if targets.masters else ()
    own = [replicas.native(each) for each in (*targets.updated, *model, *variables_of(targets.optimizer))]
    count = len(strategy.extended.worker_devices)
    mirrored = all(isinstance(each, tf.distribute.DistributedValues) and len(each.values) == count for each in own)
    return mirrored and len({id(replicas.native(each)) for each in targets.updated}) == len(targets.updated)
