"""An optimizer's arithmetic on values: of one variable, and of many small ones that are joined to a few large ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from scaler.backend import apply_steps, optimizers, replicas
from scaler.backend.graphs import has_gpu, in_xla
from scaler.backend.variables import assign_chosen, choose, flag_of, overwrites
from scaler.backend.versions import unsupported
from scaler.gradients.lists import values_of
from scaler.weights import masters as weights
from scaler.weights.masters import MasterWeights

_VALUE_BY_VALUE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Lion,
)
"""By the very class: what a subclass does is its own. RMSprop is not here, because TensorFlow rounds a reciprocal
square root by where the value stands in its tensor."""


def works_on_values(optimizer: Any) -> bool:
    """Whether the optimizer treats every value by itself, so that `moved` is its own update of any variable."""
    return type(optimizer) in _VALUE_BY_VALUE and optimizers.can_have_twins(optimizer)


def is_value_by_value(optimizer: Any, variable: Any) -> bool:
    """Whether the variable is float32 and its slots are of its shape."""
    native = replicas.native(variable)
    if native.dtype != tf.float32 or overwrites(variable):
        return False
    return all(slot.shape == native.shape for slot in optimizers.slots_of(optimizer, native).values())


class Moved(NamedTuple):
    """What a step makes of a weight and its slots, by name."""

    weight: optimizers.AssignableTensor
    slots: dict[str, tf.Tensor]


def moved(
    optimizer: Any,
    decaying: bool,
    grad: tf.Tensor,
    weight: Callable[[], tf.Tensor],
    slots: Mapping[str, tf.Tensor],
    learning_rate: tf.Tensor,
) -> Moved:
    """The weight and its slots after a step.

    Args:
        optimizer: `works_on_values`.
        decaying: Whether its weight decay applies.
        grad: Unscaled and clipped, float32.
        weight: Returns it, float32 of the same shape. It is not called if the weight is only added to.
        slots: By the names of `optimizers.slots_of`, of the same shape.
        learning_rate: Scalar float32.
    """
    value = optimizers.AssignableTensor(weight, grad.dtype)
    held = {
        name: optimizers.AssignableTensor(functools.partial(tf.convert_to_tensor, slot), slot.dtype)
        for name, slot in slots.items()
    }
    twin = optimizers.twin(optimizer, held, decaying=decaying)
    if decaying:
        getattr(type(twin), apply_steps.DECAY)(twin, [value])
        _check_moved(value, 0, apply_steps.DECAY)
    before = value.changes
    twin.update_step(grad, value, learning_rate)
    _check_moved(value, before, "update_step")
    return Moved(value, {name: slot.value for name, slot in held.items()})


def mover(optimizer: Any, learning_rate: tf.Tensor) -> Callable[[Sequence, Sequence], None]:
    """A function that moves variables by their finished gradients, where `assigned_where` says so.

    The arithmetic is traced once for all shapes of a rank and then called: Adam's has 30 operations for each variable.

    Args:
        optimizer: `works_on_values`.
        learning_rate: Scalar float32.
    """
    traced: dict[tuple, Callable] = {}

    def arithmetic(decaying: bool, rank: int, names: Sequence[str], flag: tf.Tensor | None) -> Callable:
        if (decaying, rank) not in traced:
            # Keras asks for the rank, to tell a bias from other tensors.
            any_shape = tf.TensorSpec([None] * rank, tf.float32)
            signature = [any_shape, any_shape, {name: any_shape for name in names}]

            @tf.function(autograph=False, input_signature=signature)
            def moved_once(grad: tf.Tensor, weight: tf.Tensor, slots: dict) -> tuple:
                after = moved(optimizer, decaying, grad, lambda: weight, slots, learning_rate)
                if flag is None:
                    return after.weight.value, after.slots
                chosen = {name: choose(flag, after.slots[name], before) for name, before in slots.items()}
                return choose(flag, after.weight.value, weight), chosen

            traced[decaying, rank] = moved_once
        return traced[decaying, rank]

    def move(grads: Sequence, variables: Sequence) -> None:
        for grad, variable in zip(grads, variables, strict=True):
            slots = optimizers.slots_of(optimizer, variable)
            decaying, rank = optimizers.decays(optimizer, variable), variable.shape.rank
            own = arithmetic(decaying, rank, list(slots), flag_of(variable))
            read = {name: tf.convert_to_tensor(slots[name]) for name in slots}
            weight, after = own(grad, tf.convert_to_tensor(variable), read)
            assign_chosen(variable, weight)
            for name, slot in slots.items():
                assign_chosen(slot, after[name])

    return move


def _check_moved(weight: optimizers.AssignableTensor, before: int, name: str) -> None:
    if weight.changes == before:
        raise unsupported("apply", f"no longer moves a variable in the optimizer's {name}: nothing was changed.")


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
        if in_xla() or has_gpu() or len(self._grads) < _worth_joining():
            return []  # XLA fuses them, and a GPU that selects asks for the norm of each.
        alike: dict[tuple, list[int]] = {}
        own = self._own
        for place, grad in enumerate(own):
            if not isinstance(grad, tf.IndexedSlices) and grad.dtype != tf.float64 and _is_small(grad.shape, _LARGEST):
                alike.setdefault((grad.dtype, *grad.shape[1:]), []).append(place)
        return [places for _, places in _chunked(alike, own, _CHUNK)]


def chunks_of(
    optimizer: Any, grads: Sequence, variables: Sequence, masters: MasterWeights | None
) -> list[tuple[int, ...]]:
    """The places of variables that are worth joining, in chunks of the same shape but for the first axis.

    Args:
        optimizer: A Keras optimizer, built for the variables.
        grads: One for each variable, a tensor or a `tf.IndexedSlices`.
        variables: Float32 variables on one device.
        masters: What the variables are masters for, or None.
    """
    if len(variables) < _worth_joining() or not works_on_values(optimizer):
        return []
    largest, most = limits()
    models = _models(masters, variables)
    alike: dict[tuple, list[int]] = {}
    for place, (grad, variable, model) in enumerate(zip(grads, variables, models, strict=True)):
        small = not isinstance(grad, tf.IndexedSlices) and _is_small(variable.shape, largest)
        if small and is_value_by_value(optimizer, variable):
            decaying = optimizers.decays(optimizer, variable)
            key = (decaying, grad.dtype, None if model is None else model.dtype, *variable.shape[1:])
            alike.setdefault(key, []).append(place)
    return [places for _, places in _chunked(alike, variables, most)]


class Group(NamedTuple):
    """Variables that move as one, with what moves beside them. A compiled function takes one as its argument.

    Attributes:
        weights: TensorFlow's variables, float32, of the same shape but for the first axis.
        slots: Those of each, by name.
        model: The 16-bit variable behind each master; none without masters.
        decaying: Whether the optimizer's weight decay applies to them.
    """

    weights: list[tf.Variable]
    slots: list[dict[str, tf.Variable]]
    model: list[tf.Variable]
    decaying: bool


def group(optimizer: Any, variables: Sequence, masters: MasterWeights | None) -> Group:
    """The group of some variables, all of which decay or none."""
    own = list(map(replicas.native, variables))
    model = [replicas.native(each) for each in _models(masters, variables) if each is not None]
    slots = [optimizers.slots_of(optimizer, each) for each in own]
    return Group(own, slots, model, optimizers.decays(optimizer, own[0]))


def move(optimizer: Any, group: Group, grad: tf.Tensor, learning_rate: tf.Tensor, flag: tf.Tensor | None) -> None:
    """Moves a group's variables, their slots and the 16-bit variables behind masters.

    Args:
        optimizer: `works_on_values`.
        group: Its variables.
        grad: Their gradients, unscaled, clipped and joined: float32.
        learning_rate: Scalar float32.
        flag: Scalar bool, whether they move; None if they do.
    """
    own, slots, model, decaying = group
    before = {name: joined([each[name] for each in slots]) for name in slots[0]}
    held = functools.cache(lambda: joined(own))
    copies = joined(model) if model else None
    weight = held if copies is None else lambda: weights.refreshed(held(), copies)
    after = moved(optimizer, decaying, grad, weight, before, learning_rate)
    for name, value in after.slots.items():
        _assign([each[name] for each in slots], value, before[name], flag)
    if after.weight.only and copies is None and flag is None:
        # The weights were not read, and need not be.
        method, by = after.weight.only
        for variable, part in _split(by, own):
            getattr(variable, method)(part)
        return
    value = after.weight.value
    _assign(own, value, held(), flag)
    if copies is not None:
        _assign(model, weights.rounded(value, model[0].dtype), copies, flag)


def joined(tensors: Sequence) -> tf.Tensor:
    """Tensors or variables of the same shape but for the first axis, one after another."""
    values = list(map(tf.convert_to_tensor, tensors))
    return values[0] if len(values) == 1 else tf.concat(values, 0)


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
    return chunks if sum(len(places) for _, places in chunks) >= _worth_joining() else []


def _worth_joining() -> int:
    """How many small variables of a step are worth it."""
    return _FEWEST if has_gpu() else _WORTH_JOINING


def limits() -> tuple[int, int]:
    """The most elements of a variable that is joined, and of a chunk, on the device that there is."""
    return (_LARGEST_ON_GPU, _CHUNK_ON_GPU) if has_gpu() else (_LARGEST, _CHUNK)


def _is_small(shape: tf.TensorShape, largest: int) -> bool:
    return bool(shape.rank) and shape.is_fully_defined() and 0 < shape.num_elements() <= largest


def _models(masters: MasterWeights | None, variables: Sequence) -> list:
    return [None] * len(variables) if masters is None else masters.rounded_into(variables)


def _assign(variables: Sequence, value: tf.Tensor, before: tf.Tensor, flag: tf.Tensor | None) -> None:
    value = value if flag is None else choose(flag, value, before)
    for variable, part in _split(value, variables):
        assign_chosen(variable, part)


def _split(value: tf.Tensor, variables: Sequence) -> Iterator[tuple[Any, tf.Tensor]]:
    """Each variable with its part of what was joined."""
    parts = [value] if len(variables) == 1 else tf.split(value, [each.shape[0] for each in variables])
    return zip(variables, parts, strict=True)
