"""The third part of a step: how the variables of one optimizer would move.

Keras's own `apply` always does what surrounds an update: the count of steps, moving averages, constraints. Inside a
graph and on one device its update proper is laid out in another way where it can be. An optimizer that treats every
value by itself has its arithmetic traced once, and called for each variable, with the same bits. Many small variables
are joined to few. Large ones are compiled by XLA, once a shape, where unscaling, clipping, weight decay, the update and
the rounding of masters become a few passes over memory, with the same numbers but for last bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from scaler import gradients
from scaler.backend import apply_steps, optimizers, replicas
from scaler.backend.apply_steps import read_once, read_once_a_device
from scaler.backend.autograph import with_user_autograph
from scaler.backend.graphs import has_gpu, in_xla, meet
from scaler.backend.optimizers import KerasTwo
from scaler.backend.variables import flag_of
from scaler.gate import joined
from scaler.gate.joined import is_value_by_value, mover, works_on_values
from scaler.gate.optimizers import Optimizer
from scaler.gate.targets import Part
from scaler.gradients.clipping import Limiter
from scaler.weights.masters import MasterWeights

_HANDLE = 2**12
"""What a variable costs beside its elements, in elements: each is read through a handle, however small it is."""
_WORTH_COMPILING = 2**18
_MOST = 4
"""Compiled calls of one update on a GPU, where the launch of a call for each variable takes longer than its work. On a
CPU a launch takes 20 microseconds, and to compile each variable by itself half a second more for forty of them."""
_WORTH_CALLING = 4
"""Variables. To trace a function takes as long as the arithmetic of one or two: Adam's has 30 operations for each."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the update of many variables is laid out.

    Attributes:
        chunks: The places of variables that are joined, each chunk with its scaled gradients.
        compiles: Whether the other dense ones are compiled.
        on_values: Whether their arithmetic may be traced once for all of them.
    """

    chunks: Sequence[tuple[tuple[int, ...], tf.Tensor]]
    compiles: bool
    on_values: bool


def propose(part: Part, grads: Sequence, together: joined.Joined) -> Layout | None:
    """The fastest layout that gives the numbers of an optimizer's own `apply`; None for operation by operation.

    Args:
        part: The optimizer, built for its variables.
        grads: The scaled gradients it will be given, on every replica.
        together: The same gradients side by side.
    """
    return _layout(part, grads, together) if _can_be_laid_out(part) else None


def move(part: Part, layout: Layout | None, grads: Sequence, loss_scale: tf.Tensor, limit: Limiter | None) -> None:
    """Moves an optimizer's variables on every replica: unscales, clips, updates, and rounds masters into the model.

    Args:
        part: The optimizer and its variables.
        layout: From `propose`.
        grads: Scaled gradients of any floating dtype, summed over the replicas.
        loss_scale: Scalar float32, what they are divided by. Where the update is compiled, gradients are multiplied by
            its reciprocal, which is exact for powers of two.
        limit: Clips unscaled gradients, or None.
    """
    # A layout that reads them in another order must not make another checkpoint.
    meet(own for own in map(replicas.native, part.movable) if isinstance(own, tf.Variable))
    if layout is not None:
        _Groups(part, layout, loss_scale, limit).move(grads)
        return
    # The optimizer itself moves them, operation by operation, on any number of replicas.
    calls, variables = 0, part.updated

    def update(own: list) -> None:
        nonlocal calls
        calls += 1
        _call(part.optimizer, finish_all(own, variables, loss_scale, limit), variables)

    with model_follows(part.masters), _gradients_are_reduced(part.optimizer) as sums:
        replicas.map_replicas(tf.distribute.get_strategy(), update, grads)
        if not all(map(gradients.overwrites, variables)):
            _check_not_summed_again(sums, calls)


def _layout(part: Part, grads: Sequence, together: joined.Joined) -> Layout | None:
    optimizer, variables = part.optimizer, part.updated
    # A joined gradient has no position by which to limit it.
    same = part.clip is None or part.clip.limits_all_alike
    chunks = joined.chunks_of(optimizer, grads, variables, part.masters) if same else []
    in_chunks = {place for chunk in chunks for place in chunk}
    pairs = enumerate(zip(grads, variables, strict=True))
    others = [own for place, (grad, own) in pairs if place not in in_chunks and not isinstance(grad, tf.IndexedSlices)]
    compiles = sum(map(_cost, others)) >= _WORTH_COMPILING
    on_values = works_on_values(optimizer) and all(is_value_by_value(optimizer, own) for own in others)
    # The arithmetic of an optimizer without slots is an operation or two.
    calls = (
        on_values and len(others) >= _WORTH_CALLING and bool(optimizers.slots_of(optimizer, replicas.native(others[0])))
    )
    if not chunks and not compiles and not calls:
        return None
    return Layout([(chunk, together.at(chunk)) for chunk in chunks], compiles, on_values)


def _can_be_laid_out(part: Part) -> bool:
    if (
        tf.executing_eagerly()
        or in_xla()
        or tf.distribute.has_strategy()
        or not _leaves_gradients_alone(part.optimizer)
    ):
        return False
    natives = list(map(replicas.native, part.updated))
    # Keras passes pairs to `step`, where a gradient's position is known by its variable.
    each_once = len({id(native) for native in natives}) == len(natives)
    if any(native.dtype == tf.float64 for native in natives):
        return False
    # A layout refreshes and writes masters a few at a time, the optimizer's own update all of them once.
    alike = each_once and len({native.device for native in natives}) == 1
    return alike and (part.masters is None or part.masters.compiles)


def _leaves_gradients_alone(optimizer: Optimizer) -> bool:
    """Whether it is one of Keras's own, which are tested, and its `apply` leaves gradients alone before the update."""
    return (
        isinstance(optimizer, keras.optimizers.Optimizer)
        and type(optimizer).__module__.startswith("keras.")
        and not hasattr(optimizer, "optimizers")  # A MultiOptimizer, which has others do the work.
        and not optimizer.gradient_accumulation_steps
        and optimizer.clipnorm is optimizer.clipvalue is optimizer.global_clipnorm is None
        and apply_steps.can_be_compiled(optimizer)
    )


class _Groups:
    """An update in groups: chunks of small variables, compiled groups of large ones, and the rest one by one."""

    def __init__(self, part: Part, layout: Layout, loss_scale: tf.Tensor, limit: Limiter | None):
        self._optimizer, self._masters, self._layout = part.optimizer, part.masters, layout
        self._variables = part.updated
        self._loss_scale, self._limit = loss_scale, limit
        self._limits_all_alike = part.clip is None or part.clip.limits_all_alike
        self._places = {id(replicas.native(variable)): place for place, variable in enumerate(self._variables)}

    def move(self, grads: Sequence) -> None:
        """As the function. Keras's `apply` calls `step` for the update itself."""

        def step(strategy: Any, pairs: Sequence[tuple], learning_rate: Any) -> None:
            del strategy
            with read_once(self._optimizer):
                self._move_groups(pairs, tf.convert_to_tensor(learning_rate))

        done_in_step = {apply_steps.DECAY: lambda variables: None, apply_steps.SUM: lambda pairs: pairs}
        with apply_steps.taken_over(self._optimizer, **done_in_step, **{apply_steps.UPDATE: step}) as calls:
            self._optimizer.apply(list(grads), list(self._variables))
        if not all(map(gradients.overwrites, self._variables)):
            apply_steps.check_called_once(calls, apply_steps.UPDATE)
            if self._optimizer.weight_decay:
                apply_steps.check_called_once(calls, apply_steps.DECAY)
        # Keras assigns the variables once more after the update: by averages or by constraints.
        constrained = any(variable.constraint for variable in self._variables)
        if self._masters and (self._optimizer.ema_overwrite_frequency or constrained):
            self._masters.write()

    def _move_groups(self, pairs: Sequence[tuple], learning_rate: tf.Tensor) -> None:
        for chunk, grad in self._layout.chunks:
            whole = finish_one(grad, self._loss_scale, self._limit, None)
            own = [self._variables[place] for place in chunk]
            group = joined.group(self._optimizer, own, self._masters)
            joined.move(self._optimizer, group, whole, learning_rate, flag_of(group.weights[0]))
        in_chunks = {place for chunk, _ in self._layout.chunks for place in chunk}
        others = [pair for pair in pairs if self._place(pair[1]) not in in_chunks]
        sparse = [pair for pair in others if isinstance(pair[0], tf.IndexedSlices)]
        dense = [pair for pair in others if not isinstance(pair[0], tf.IndexedSlices)]
        self._move_some(sparse, self._update_one_by_one, learning_rate)
        # XLA takes as long over a small one as over a large one, which alone makes up for it.
        large = [pair for pair in dense if _cost(pair[1]) >= _WORTH_COMPILING // 32] if self._layout.compiles else []
        compiled = {id(variable) for _, variable in large}
        self._move_some([pair for pair in dense if id(pair[1]) not in compiled], self._update, learning_rate)
        self._move_compiled(large, learning_rate)

    def _place(self, variable: Any) -> int:
        return self._places[id(variable)]

    def _move_some(self, pairs: Sequence[tuple], update: Callable[..., None], learning_rate: tf.Tensor) -> None:
        if not pairs:
            return
        ready = [finish_one(grad, self._loss_scale, self._limit, self._place(own)) for grad, own in pairs]
        with model_follows(self._masters, [own for _, own in pairs]):
            update(ready, [self._place(own) for _, own in pairs], learning_rate)

    def _move_compiled(self, pairs: Sequence[tuple], learning_rate: tf.Tensor) -> None:
        """Calls a compiled function for each variable, on a GPU a few for all. Calls of one kind share a function."""
        if not pairs:
            return
        inverse = 1.0 / self._loss_scale
        shares = self._layout.on_values and self._limits_all_alike
        functions: dict[tuple, Callable] = {}
        for call in balanced(pairs) if has_gpu() else [[pair] for pair in pairs]:
            grads, variables = zip(*call, strict=True)
            places = list(map(self._place, variables))
            groups = [joined.group(self._optimizer, [own], self._masters) for own in variables]
            alike = [(grad.dtype, group.decaying, grad.shape) for grad, group in zip(grads, groups, strict=True)]
            kind = tuple(alike if shares else places)
            if kind not in functions:
                flag = flag_of(groups[0].weights[0])
                functions[kind] = self._compiled(places, inverse, learning_rate, flag)
            functions[kind](grads, groups)

    def _compiled(
        self, places: Sequence[int], inverse: tf.Tensor, learning_rate: tf.Tensor, flag: tf.Tensor | None
    ) -> Callable:
        @tf.function(jit_compile=True, autograph=False)
        def compiled_update(grads: Sequence[tf.Tensor], groups: Sequence[joined.Group]) -> None:
            unscaled = gradients.multiply(grads, inverse)
            ready = [_limited(grad, self._limit, place) for grad, place in zip(unscaled, places, strict=True)]
            if not self._layout.on_values:
                with model_follows(self._masters, [self._variables[place] for place in places]):
                    self._update_one_by_one(ready, places, learning_rate)
                return
            for grad, group in zip(ready, groups, strict=True):
                joined.move(self._optimizer, group, grad, learning_rate, flag)

        return compiled_update

    def _update(self, grads: Sequence, places: Sequence[int], learning_rate: tf.Tensor) -> None:
        if not self._layout.on_values:
            self._update_one_by_one(grads, places, learning_rate)
            return
        mover(self._optimizer, learning_rate)(grads, [replicas.native(self._variables[place]) for place in places])

    def _update_one_by_one(self, grads: Sequence, places: Sequence[int], learning_rate: tf.Tensor) -> None:
        own = [self._variables[place] for place in places]
        getattr(type(self._optimizer), apply_steps.DECAY)(self._optimizer, own)
        for grad, variable in zip(grads, map(replicas.native, own), strict=True):
            self._optimizer.update_step(grad, variable, learning_rate)


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


def _cost(variable: Any) -> int:
    return variable.shape.num_elements() + _HANDLE


def _call(optimizer: Optimizer, grads: list, variables: Sequence) -> None:
    """Every replica calls this, with the same gradients."""
    if isinstance(optimizer, keras.optimizers.Optimizer):
        with read_once_a_device(optimizer):
            optimizer.apply(grads, variables)
    elif isinstance(optimizer, KerasTwo):
        optimizer.apply(grads, variables)
    else:
        update = optimizer.apply if hasattr(optimizer, "apply") else optimizer
        with_user_autograph(update)(grads, [replicas.own_component(variable) for variable in variables])


@contextlib.contextmanager
def _gradients_are_reduced(optimizer: Optimizer) -> Iterator[list[Counter[str]]]:
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


def _check_not_summed_again(sums: list[Counter[str]], times: int) -> None:
    """Refuses an optimizer that may have summed over the replicas by another step than the one that was taken over.

    Args:
        sums: From `_gradients_are_reduced`.
        times: How many replicas have called `apply`.

    Raises:
        UnsupportedVersion: If none of the optimizers, or one of them not on every replica, has called that step.
    """
    if replicas.replica_count() == 1 or not sums:
        return
    called = [calls for calls in sums if calls] or sums[:1]
    for calls in called:
        apply_steps.check_called_once(calls, apply_steps.SUM, times)


@contextlib.contextmanager
def model_follows(masters: MasterWeights | None, weights: Sequence | None = None) -> Iterator[None]:
    """Surrounds an update: masters first take over what was assigned to the model, and are rounded into it last.

    Args:
        masters: None if the model itself is updated.
        weights: Those of the masters that the update moves; all if not given.
    """
    if masters:
        masters.refresh(weights)
    yield
    if masters:
        masters.write(weights)


def finish_one(
    grad: tf.Tensor | tf.IndexedSlices, loss_scale: tf.Tensor, limit: Limiter | None, position: int | None
) -> gradients.Gradient:
    """One gradient, divided by the loss scale and clipped, in a graph that TensorFlow may rewrite.

    Args:
        grad: A scaled gradient of any floating dtype.
        loss_scale: Scalar float32.
        limit: Clips unscaled gradients, or None.
        position: Where the gradient stands among all gradients of the optimizer; None if the limit is the same for all.
    """
    (unscaled,) = gradients.divide([grad], loss_scale)
    finished = _limited(unscaled, limit, position)
    untouched = limit is None and gradients.is_one(loss_scale)
    return finished if untouched else gradients.opaque([finished])[0]


def finish_all(grads: Sequence, variables: Sequence, loss_scale: tf.Tensor, limit: Limiter | None) -> list:
    """All gradients, divided by the loss scale and clipped. The new value of a variable is neither.

    Args:
        grads: Scaled gradients of any floating dtype.
        variables: One for each gradient.
        loss_scale: Scalar float32.
        limit: Clips unscaled gradients, or None.
    """
    pairs = enumerate(zip(grads, variables, strict=True))
    return [
        grad if gradients.overwrites(variable) else finish_one(grad, loss_scale, limit, position)
        for position, (grad, variable) in pairs
    ]


def _limited(unscaled: Any, limit: Callable[..., tf.Tensor] | None, position: int | None) -> gradients.Gradient:
    return unscaled if limit is None else gradients.limit(unscaled, limit, position)
