"""Many small variables are updated as a few large ones: read, joined, moved by the optimizer's arithmetic, and split.

The arithmetic on a small variable takes less time than starting its operations, of which Adam has a dozen. Joined, a
chunk of variables needs them once. Only optimizers that treat every value by itself can be given joined variables; the
numbers are then those of the optimizer's own `apply`, bit for bit.

The variables keep their own storage, so that nothing can be told from outside. What a step reads is copied, and costs:
so large variables are left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend import optimizers, replicas
from scaler.backend.graphs import has_gpu, in_xla
from scaler.backend.variables import assign_chosen, choose, flag_of
from scaler.gate.on_values import is_value_by_value, moved, works_on_values
from scaler.gradients.lists import values_of
from scaler.weights import masters as weights
from scaler.weights.masters import MasterWeights

_LARGEST = 2**11
"""Elements of a variable. To copy a larger one takes as long as the operations that this saves."""
_CHUNK = 2**14
"""Elements of a chunk: float32 gradient, weight and slots stay in a core's cache from one operation to the next."""
_LARGEST_ON_GPU, _CHUNK_ON_GPU = 2**16, 2**22
"""A GPU starts an operation in the time in which it copies a quarter of a megabyte, and has no use for small chunks.
Reckoned and not measured: `make gpu` compares them with others."""
_FEWEST = 4
"""Variables of a chunk. Joining fewer costs more than it saves."""
_WORTH_JOINING = 100
"""Small variables of a step. On a CPU a whole step with fewer is as fast one by one."""


class Joined:
    """The gradients of a step side by side. Who measures and who moves the same ones share what was joined.

    Args:
        strategy: TensorFlow's, from what `replicas.merge` calls.
        grads: One for each variable, on every replica, without duplicate indices.
    """

    def __init__(self, strategy: Any, grads: Sequence):
        self._strategy, self._grads = strategy, grads
        self._made: dict[tuple[int, ...], Any] = {}

    def at(self, places: tuple[int, ...]) -> Any:
        """The scaled gradients at these places, one after another, on every replica."""
        if places not in self._made:
            self._made[places] = replicas.map_replicas(self._strategy, joined, [self._grads[place] for place in places])
        return self._made[places]

    @property
    def size(self) -> int | None:
        """How many elements all of them have together, or None if a shape is not known."""
        sizes = [values_of(grad).shape.num_elements() for grad in self._own]
        return None if None in sizes else sum(sizes)

    @property
    def _own(self) -> list:
        return [replicas.local_values(self._strategy, grad)[0] for grad in self._grads]

    def places(self) -> list[tuple[int, ...]]:
        """The places of small gradients whose norm is taken as that of one tensor.

        It depends on the gradients alone: a norm has the same bits whoever updates, and whether it selects.
        """
        if in_xla() or has_gpu():
            return []  # XLA fuses them, and a GPU that selects asks for the norm of each.
        alike: dict[tuple, list[int]] = {}
        own = self._own
        for place, grad in enumerate(own):
            if not isinstance(grad, tf.IndexedSlices) and grad.dtype != tf.float64 and _is_small(grad.shape, _LARGEST):
                alike.setdefault((grad.dtype, *grad.shape[1:]), []).append(place)
        return [places for _, places in _chunked(alike, own, _CHUNK)]


class Chunk(NamedTuple):
    """Variables that are updated as one, along their first axis.

    Attributes:
        places: Their positions among the variables of the step.
        decaying: Whether the optimizer's weight decay applies to them.
    """

    places: tuple[int, ...]
    decaying: bool


def chunks_of(optimizer: Any, grads: Sequence, variables: Sequence, masters: MasterWeights | None) -> list[Chunk]:
    """The variables that are worth joining, in chunks of the same shape but for the first axis.

    Args:
        optimizer: A Keras optimizer, built for the variables.
        grads: One for each variable, a tensor or a `tf.IndexedSlices`.
        variables: Float32 variables on one device.
        masters: What the variables are masters for, or None.
    """
    if not works_on_values(optimizer):
        return []
    largest, most = limits()
    models = _models(masters, variables)
    alike: dict[tuple, list[int]] = {}
    for place, (grad, variable, model) in enumerate(zip(grads, variables, models, strict=True)):
        if _joins(optimizer, grad, variable, largest):
            decaying = optimizers.decays(optimizer, variable)
            key = (decaying, grad.dtype, None if model is None else model.dtype, *variable.shape[1:])
            alike.setdefault(key, []).append(place)
    return [Chunk(places, decaying) for (decaying, *_), places in _chunked(alike, variables, most)]


def move(
    optimizer: Any,
    chunk: Chunk,
    grad: tf.Tensor,
    variables: Sequence,
    masters: MasterWeights | None,
    learning_rate: tf.Tensor,
) -> None:
    """Moves a chunk's variables, their slots and the 16-bit variables behind masters.

    Args:
        optimizer: From `chunks_of`.
        chunk: One of `chunks_of`.
        grad: The gradients of its variables, unscaled, clipped and joined: float32.
        variables: All variables of the step.
        masters: What the variables are masters for, or None.
        learning_rate: Scalar float32.
    """
    given = [variables[place] for place in chunk.places]
    own = list(map(replicas.native, given))
    model = [replicas.native(each) for each in _models(masters, given) if each is not None]
    slots = [optimizers.slots_of(optimizer, each) for each in own]
    before = {name: joined([each[name] for each in slots]) for name in slots[0]}
    held = functools.cache(lambda: joined(own))
    copies = joined(model) if model else None
    weight = held if copies is None else lambda: weights.refreshed(held(), copies)
    after = moved(optimizer, chunk.decaying, grad, weight, before, learning_rate)
    for name, value in after.slots.items():
        _assign([each[name] for each in slots], value, before[name])
    if after.weight.only and copies is None and flag_of(own[0]) is None:
        # The weights were not read, and need not be.
        method, by = after.weight.only
        for variable, part in _split(by, own):
            getattr(variable, method)(part)
        return
    value = after.weight.value
    _assign(own, value, held())
    if copies is not None:
        _assign(model, weights.rounded(value, model[0].dtype), copies)


def joined(tensors: Sequence) -> tf.Tensor:
    """Tensors or variables of the same shape but for the first axis, one after another."""
    return tf.concat([tf.convert_to_tensor(each) for each in tensors], 0)


def cut(places: Sequence[int], variables: Sequence, most: int) -> list[list[int]]:
    """The places in order, in groups of variables that have up to `most` elements together."""
    groups: list[list[int]] = []
    room = 0
    for place in places:
        size = variables[place].shape.num_elements()
        if size > room:
            groups.append([])
            room = most
        groups[-1].append(place)
        room -= size
    return groups


def _chunked(alike: dict[tuple, list[int]], variables: Sequence, most: int) -> list[tuple[tuple, tuple[int, ...]]]:
    """The places of each kind, cut into chunks; nothing if they are too few to be worth it."""
    chunks = [(kind, tuple(places)) for kind, found in alike.items() for places in cut(found, variables, most)]
    chunks = [(kind, places) for kind, places in chunks if len(places) >= _FEWEST]
    worth = _FEWEST if has_gpu() else _WORTH_JOINING
    return chunks if sum(len(places) for _, places in chunks) >= worth else []


def limits() -> tuple[int, int]:
    """The most elements of a variable that is joined, and of a chunk, on the device that there is."""
    return (_LARGEST_ON_GPU, _CHUNK_ON_GPU) if has_gpu() else (_LARGEST, _CHUNK)


def _joins(optimizer: Any, grad: Any, variable: Any, largest: int) -> bool:
    if isinstance(grad, tf.IndexedSlices) or not _is_small(variable.shape, largest):
        return False
    return is_value_by_value(optimizer, variable)


def _is_small(shape: tf.TensorShape, largest: int) -> bool:
    return bool(shape.rank) and shape.is_fully_defined() and 0 < shape.num_elements() <= largest


def _models(masters: MasterWeights | None, variables: Sequence) -> list:
    return [None] * len(variables) if masters is None else masters.rounded_into(variables)


def _assign(variables: Sequence, value: tf.Tensor, before: tf.Tensor) -> None:
    flag = flag_of(variables[0])
    value = value if flag is None else choose(flag, value, before)
    for variable, part in _split(value, variables):
        assign_chosen(variable, part)


def _split(value: tf.Tensor, variables: Sequence) -> Iterator[tuple[Any, tf.Tensor]]:
    """Each variable with its part of what was joined."""
    return zip(variables, tf.split(value, [each.shape[0] for each in variables]), strict=True)
