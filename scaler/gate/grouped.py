"""An update in groups, each moved in the way that is fastest for it: small variables joined, large ones compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from scaler import gradients
from scaler.backend import apply_steps, replicas
from scaler.backend.graphs import in_xla
from scaler.backend.iterations import read_once
from scaler.gate import joined
from scaler.gate.compiled import balanced, in_one_call, worth_compiling
from scaler.gate.on_values import is_value_by_value, mover, works_on_values
from scaler.gate.optimizers import Optimizer
from scaler.gate.targets import Targets, model_follows
from scaler.gate.unscale_and_clip import finish, finish_one
from scaler.gradients.clipping import Clipping, Limiter
from scaler.weights.masters import MasterWeights


@dataclasses.dataclass(frozen=True)
class Grouped:
    """A Keras optimizer moves variables in groups, inside a graph and on one device.

    Attributes:
        optimizer: It was built for the variables.
        variables: One for each gradient.
        masters: What the variables are masters for, or None.
        chunks: The variables that are joined, each chunk with its scaled gradients.
        compiles: Whether the other dense ones are compiled.
        on_values: Whether the compiled arithmetic may be traced once for all of them.
    """

    optimizer: Optimizer
    variables: Sequence
    masters: MasterWeights | None
    chunks: Sequence[tuple[joined.Chunk, tf.Tensor]]
    compiles: bool
    on_values: bool

    def move(self, grads: Sequence, loss_scale: tf.Tensor, limit: Limiter | None) -> None:
        """Moves the variables.

        Keras's `apply` does all that surrounds the update, such as the count of steps and moving averages, and calls
        `step` for the update itself.

        Args:
            grads: Scaled gradients of any floating dtype, without duplicate indices.
            loss_scale: Scalar float32. Where the update is compiled, gradients are multiplied by its reciprocal, which
                is exact for powers of two.
            limit: Clips unscaled gradients, or None.
        """
        inverse = 1.0 / loss_scale
        places = {id(replicas.native(variable)): place for place, variable in enumerate(self.variables)}
        in_chunks = {place for chunk, _ in self.chunks for place in chunk.places}

        def finish_plainly(grad: tf.Tensor | tf.IndexedSlices, place: int | None) -> gradients.Gradient:
            return finish_one(grad, loss_scale, limit, place)

        def finish_compiled(grad: tf.Tensor, place: int) -> gradients.Gradient:
            return finish(grad, lambda one: gradients.multiply(one, inverse), limit, place)

        def move_with(finished: Callable[..., Any], update: Callable[..., None]) -> Callable[..., None]:
            def move_some(grads: Sequence, variables: Sequence, learning_rate: tf.Tensor) -> None:
                own = [places[id(variable)] for variable in variables]
                ready = [finished(grad, place) for grad, place in zip(grads, own, strict=True)]
                with model_follows(self.masters, variables):
                    update(ready, own, learning_rate)

            return move_some

        def step(strategy: Any, pairs: Sequence[tuple], learning_rate: Any) -> None:
            del strategy
            with read_once(self.optimizer):
                move_groups(pairs, tf.convert_to_tensor(learning_rate))

        def move_groups(pairs: Sequence[tuple], learning_rate: tf.Tensor) -> None:
            for chunk, grad in self.chunks:
                whole = finish_plainly(grad, None)
                joined.move(self.optimizer, chunk, whole, self.variables, self.masters, learning_rate)
            others = [pair for pair in pairs if places[id(pair[1])] not in in_chunks]
            compiled = [pair for pair in others if self.compiles and not isinstance(pair[0], tf.IndexedSlices)]
            one_by_one = [pair for pair in others if not any(pair is other for other in compiled)]
            if one_by_one:
                move_with(finish_plainly, self._one_by_one)(*_unzipped(one_by_one), learning_rate)
            for group in balanced(compiled):
                in_one_call(move_with(finish_compiled, self._in_xla), *_unzipped(group), learning_rate)

        done_in_step = {apply_steps.DECAY: lambda variables: None, apply_steps.SUM: lambda pairs: pairs}
        with apply_steps.taken_over(self.optimizer, **done_in_step, **{apply_steps.UPDATE: step}) as calls:
            self.optimizer.apply(list(grads), list(self.variables))
        if not all(map(gradients.overwrites, self.variables)):
            apply_steps.check_called_once(calls, apply_steps.UPDATE)
            if self.optimizer.weight_decay:
                apply_steps.check_called_once(calls, apply_steps.DECAY)
        if self.masters and joined.moves_masters_after_the_step(self.optimizer, self.variables):
            self.masters.write()

    def _one_by_one(self, grads: Sequence, places: Sequence[int], learning_rate: tf.Tensor) -> None:
        own = [self.variables[place] for place in places]
        getattr(type(self.optimizer), apply_steps.DECAY)(self.optimizer, own)
        for grad, variable in zip(grads, map(replicas.native, own), strict=True):
            self.optimizer.update_step(grad, variable, learning_rate)

    def _in_xla(self, grads: Sequence, places: Sequence[int], learning_rate: tf.Tensor) -> None:
        own = [self.variables[place] for place in places]
        if self.on_values:
            mover(self.optimizer, learning_rate)(grads, list(map(replicas.native, own)))
        else:
            self._one_by_one(grads, places, learning_rate)


def grouped(targets: Targets, grads: Sequence, clip: Clipping | None, together: joined.Joined) -> Grouped | None:
    """The update in groups, or None where the optimizer's own `apply` is as fast, or has to be left as it is.

    Args:
        targets: What the update moves.
        grads: The scaled gradients it will be given.
        clip: How unscaled gradients are limited, or None.
        together: The same gradients side by side.
    """
    optimizer, variables, masters = targets.optimizer, targets.updated, targets.masters
    if not _can_be_grouped(optimizer, variables, masters):
        return None
    # A joined gradient has no position by which to limit it.
    same = clip is None or clip.limits_all_alike
    chunks = joined.chunks_of(optimizer, grads, variables, masters) if same else []
    in_chunks = {place for chunk in chunks for place in chunk.places}
    pairs = enumerate(zip(grads, variables, strict=True))
    others = [own for place, (grad, own) in pairs if place not in in_chunks and not isinstance(grad, tf.IndexedSlices)]
    compiles = worth_compiling(others)
    if not chunks and not compiles:
        return None
    on_values = works_on_values(optimizer) and all(is_value_by_value(optimizer, own) for own in others)
    with_grads = [(chunk, together.at(chunk.places)) for chunk in chunks]
    return Grouped(optimizer, variables, masters, with_grads, compiles, on_values)


def _can_be_grouped(optimizer: Optimizer, variables: Sequence, masters: MasterWeights | None) -> bool:
    if (
        tf.executing_eagerly()
        or in_xla()
        or tf.distribute.has_strategy()
        or not joined.leaves_gradients_alone(optimizer)
    ):
        return False
    natives = [replicas.native(variable) for variable in variables]
    # Keras passes pairs to `step`, where a gradient's position is known by its variable.
    each_once = len({id(native) for native in natives}) == len(natives)
    if any(native.dtype == tf.float64 for native in natives):
        return False
    # A grouped update refreshes and writes masters a few at a time, a plain one all of them once.
    return each_once and len({native.device for native in natives}) == 1 and (masters is None or masters.compiles)


def _unzipped(pairs: Sequence[tuple]) -> tuple[list, list]:
    return [grad for grad, _ in pairs], [variable for _, variable in pairs]
