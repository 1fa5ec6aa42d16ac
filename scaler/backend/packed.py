"""Named tensors of one dtype in one variable.

A step that XLA compiles pays for each variable, about 5 microseconds, and hardly for its length. A checkpoint has an
entry for each name all the same, so that a program with other names takes what it knows.

_serialize_to_tensors   what a checkpoint writes of an object    absent: whole variables are written, which only the
_restore_from_tensors   how it is read                             same names can read
_trackable_children     what belongs to an object
_self_...               what TensorFlow remembers of an object   absent: nothing is left out of a copy

What a checkpoint restores: the parts that it looks up, and values that wait for parts that are not made yet:

_lookup_dependency       is called for each part of an object     absent: a checkpoint of an optimizer that was not
                                                                    wrapped is restored without its slots; one warning
_deferred_dependencies   the values that an object keeps for      absent: nothing is known of them, and a save
                           parts that it lacks; their shapes        before the first step loses them; one warning
                           by `object_graph_proto`, `shape_map`
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from scaler.backend.autograph import no_autograph
from scaler.backend.graphs import has_gpu, saved_beside_functions
from scaler.backend.variables import check_restored_shape
from scaler.backend.versions import say_once

_VALUE = "VARIABLE_VALUE"
"""The key under which a checkpoint has the value of a variable."""


class Packed:
    """Named tensors in a variable of shape [elements]: scalars first, then those of other shapes.

    Attributes:
        variable: The variable.
        names: Of the tensors.

    Args:
        values: What each name holds at first, all of one dtype.
        name: Of the variable.
        make: Makes the variable from its first value and its name.
    """

    def __init__(self, values: Mapping[str, tf.Tensor], name: str, make: Callable[[tf.Tensor, str], tf.Variable]):
        values = {key: tf.convert_to_tensor(value) for key, value in values.items()}
        ordered = sorted(values, key=lambda key: values[key].shape.rank > 0)  # A stable sort.
        self._shapes = {key: tuple(values[key].shape) for key in ordered}
        self.names = frozenset(self._shapes)
        self._scalars = [key for key in ordered if not self._shapes[key]]
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        self._places = dict(zip(ordered, itertools.accumulate([0, *sizes]), strict=False))
        self.variable = make(self.joined(values), name)

    def read(self, of: tf.Variable | tf.Tensor | None = None) -> dict[str, tf.Tensor]:
        """The tensors by their names.

        Args:
            of: Where to read them. Default: the variable, and in a replica its component.
        """
        source = self.variable if of is None else of
        flat = source if isinstance(source, tf.Tensor) else tf.identity(source)
        count = len(self._scalars)
        if not count or (flat.dtype.is_integer and has_gpu()):  # `tf.unstack` of int64 is the host's on a GPU.
            return {key: self._part(flat, key) for key in self._shapes}
        scalars = tf.unstack(flat if count == len(self._shapes) else flat[:count], num=count)
        others = {key: self._part(flat, key) for key, shape in self._shapes.items() if shape}
        return dict(zip(self._scalars, scalars, strict=True)) | others

    def one(self, key: str) -> tf.Tensor:
        """The tensor of one name."""
        return self._part(tf.identity(self.variable), key)

    def _part(self, flat: tf.Tensor, key: str) -> tf.Tensor:
        """One tensor of the flat one."""
        shape, place = self._shapes[key], self._places[key]
        if not shape:
            return flat[place]
        part = flat[place : place + math.prod(shape)]
        return part if len(shape) == 1 else tf.reshape(part, shape)

    def joined(self, values: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """What the variable holds if it has these values, one for each name."""
        others = [values[key] for key, shape in self._shapes.items() if shape]
        others = [one if one.shape.rank == 1 else tf.reshape(one, [-1]) for one in others]
        scalars = [tf.stack([values[key] for key in self._scalars])] if self._scalars else []
        return tf.concat([*scalars, *others], 0) if others else scalars[0]

    def put(self, key: str, value: tf.Tensor) -> None:
        """Gives one name another value, on every replica, outside of a step."""
        for part in getattr(self.variable, "values", (self.variable,)):
            part.assign(self.joined({**self.read(part), key: tf.cast(value, part.dtype)}))

    def entries(self) -> dict[str, Entry]:
        """What a checkpoint holds, by name."""
        return {key: Entry(self, key) for key in self._shapes}


class ByName(tf.Module):
    """A module of which checkpoints hold entries, and a SavedModel the variables themselves.

    A subclass names its attributes that hold either.
    """

    _ENTRIES: tuple[str, ...] = ()
    _VARIABLES: str = ""

    def __getstate__(self) -> dict:
        # A copy makes its own entries, and `__setstate__` has TensorFlow track them.
        left_out = (*self._ENTRIES, self._VARIABLES)
        own = {name: value for name, value in vars(self).items() if name not in left_out}
        return {name: value for name, value in own.items() if not name.startswith("_self_")}

    def __setstate__(self, state: dict) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def _trackable_children(self, save_type: str = "checkpoint", **named: Any) -> dict:
        left_out = (self._VARIABLES,) if save_type == "checkpoint" and _reads_entries() else self._ENTRIES
        children = super()._trackable_children(save_type, **named)
        own = {name: child for name, child in children.items() if name not in left_out}
        return own if save_type == "checkpoint" else own | saved_beside_functions()


def _reads_entries() -> bool:
    """Whether the installed TensorFlow asks an object what to write and to read."""
    return all(hasattr(tf.Module, name) for name in ("_serialize_to_tensors", "_restore_from_tensors"))


class Entry(tf.Module):
    """One of the names of a `Packed`, as a checkpoint sees it.

    Args:
        packed: What holds it.
        key: Its name there.
        called: What a sentence calls it. Default: its name.
        remedy: What to do if a checkpoint holds a value of another shape, the end of a sentence.
        on_restored: Called whenever a checkpoint restores it.
    """

    def __init__(
        self,
        packed: Packed,
        key: str,
        called: str = "",
        remedy: str = "restore it into one that has the same",
        on_restored: Callable[[], None] = lambda: None,
    ):
        super().__init__()
        self._packed, self._key, self._called, self._remedy = packed, key, called or key, remedy
        self._on_restored = on_restored

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its value."""
        return self._packed._shapes[self._key]

    def read(self) -> tf.Tensor:
        """Its value, of the first replica."""
        first = getattr(self._packed.variable, "values", (self._packed.variable,))[0]
        return self._packed.read(first)[self._key]

    def numpy(self) -> Any:
        """Its value on the host."""
        return self.read().numpy()

    def assign(self, value: Any) -> None:
        """Gives it another value, on every replica."""
        self._packed.put(self._key, tf.convert_to_tensor(value))

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {_VALUE: self.read()}

    @no_autograph
    def _restore_from_tensors(self, tensors: dict[str, tf.Tensor]) -> None:
        value = tensors[_VALUE]
        check_restored_shape(value, tf.TensorShape(self.shape), self._called, self._remedy)
        self._on_restored()
        self.assign(value)


class ChecksRestoredParts:
    """Calls `check_part` with each part that a checkpoint looks up in an object, before the part is restored."""

    def check_part(self, name: str, cached_dependencies: dict | None) -> None:
        """Raises an error for a part that must not be restored.

        Args:
            name: The part's name in the checkpoint.
            cached_dependencies: The parts that the object has.
        """

    def _lookup_dependency(self, name: str, cached_dependencies: dict | None = None) -> Any:
        self.check_part(name, cached_dependencies)
        parent: Any = super()
        return parent._lookup_dependency(name, cached_dependencies)


def warn_if_hook_missing() -> None:
    """Warns once if these versions never call `check_part`."""
    if not hasattr(keras.optimizers.Optimizer, "_lookup_dependency"):
        say_once(
            "does not tell what a checkpoint looks for: a checkpoint of an optimizer that was not wrapped is silently "
            "restored into a LossScaleOptimizer without its slots. Restore it into optimizer.inner_optimizer."
        )


def awaited_shape(owner: Any, part: str, variable: str) -> tf.TensorShape | None:
    """The shape of a variable whose value waits for the part of an object that will hold it; None if none does.

    Args:
        owner: A `tf.Module` into which a checkpoint was restored, in eager mode.
        part: The name of a dict that the object does not have yet.
        variable: A key of the dict.
    """
    try:
        waiting = owner._deferred_dependencies.get(part, ())
        if not waiting:
            return None
        newest = max(waiting, key=lambda one: one.restore_uid)
        nodes = newest.checkpoint.object_graph_proto.nodes
        (number,) = (one.node_id for one in newest.object_proto.children if one.local_name == variable)
        return tf.TensorShape(newest.checkpoint.shape_map[nodes[number].attributes[0].checkpoint_key])
    except (AttributeError, TypeError, ValueError, KeyError, IndexError):
        say_once(
            "does not tell what a checkpoint holds of a SpikeGuard(by_tensor=...): saved again before the next step, "
            "its windows are lost."
        )
        return None


def scope_of(variable: tf.Variable) -> Any:
    """The scope of the `tf.distribute` strategy whose variable it is."""
    strategy = getattr(variable, "distribute_strategy", None)
    return (strategy or tf.distribute.get_strategy()).scope()
