"""A run's complete state between two steps: what a checkpoint holds, and its copy in host memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from loops.backend.checkpoints import values
from loops.loop.counters import CounterVariables
from loops.loop.state import replicas
from loops.loop.state.actions import ActionStates
from loops.loop.state.change import AS_SAVED, Unlike
from loops.loop.state.facts import FORMAT
from loops.loop.state.identity import check_layout, warn_of_places
from loops.loop.state.position import Position
from loops.loop.state.randomness import generators, set_generators
from loops.loop.state.resources import StepResources
from loops.loop.state.settings import differences
from loops.loop.state.source_position import SourcePosition
from loops.loop.state.trainable import check_trainable
from loops.loop.state.variables import Groups, layout
from loops.support.errors import CheckpointError
from loops.support.written.place import reason


class RunState:
    """Variables on every replica, tables, iterators, counters, the position, random generators and the actions' state.

    An action's state is saved if it has two methods: `save_state()` returns a value that JSON can hold, and
    `load_state(value)` takes it before the first step of a resumed run.

    Attributes:
        changes: The steps from which the run went on with other settings, and what they were.
        complete: Whether the run is over: at its goal, or ended by an action.

    Args:
        groups: From `variable_groups`.
        held: The step's tables and iterators.
        counters: The loop's.
        position: The loop's position in its dataset.
        actions: The states of the loop's.
        identity: From `identity.identity`: must be the same in a run that resumes.
        settings: From `settings.settings`: may differ in a run that resumes, with a warning.
        trainable: From `trainable_flags`: must be the same in a run that resumes.
        loss_scaler: The train step's, or None; its state is described in the checkpoint.
    """

    def __init__(
        self,
        *,
        groups: Groups,
        held: StepResources,
        counters: CounterVariables,
        position: Position | SourcePosition,
        actions: ActionStates,
        identity: Mapping,
        settings: Mapping,
        trainable: Mapping[str, str],
        loss_scaler: Any = None,
    ):
        self.groups, self.held = groups, held
        self.identity, self.settings = dict(identity), dict(settings)
        self._trainable = dict(trainable)
        self._counters, self._position, self._loss_scaler = counters, position, loss_scaler
        self._actions = actions
        self.changes: list[dict] = []
        self.complete = False
        self._ahead = 0  # Batches of the dataset beyond the counters' own: they may once have had another size.
        self._facts = _Facts(self._describe)

    def trackables(self) -> dict:
        """The objects to give to `tf.train.Checkpoint`."""
        saved: dict[str, Any] = {group: list(variables) for group, variables in self.groups.items()}
        saved["counters"] = [self._counters.data, self._counters.attempted, self._counters.applied]
        saved["facts"] = self._facts
        saved |= self._position.trackables()
        if self.held.saved:
            saved["held"] = self.held.saved
        return saved

    def check(self, path: str, facts: Mapping, unlike: Unlike = AS_SAVED) -> None:
        """Makes sure that a checkpoint holds the variables and tables of this run, and warns where it does not seem so.

        Args:
            path: Of a checkpoint of this run.
            facts: Those saved in it.
            unlike: What is not restored as it was saved.

        Raises:
            CheckpointError: If other variables or tables were saved, or other weights were trained.
        """
        saved, here = (
            {group: entries for group, entries in groups.items() if group not in unlike.apart}
            for groups in (facts["variables"], layout(self.groups))
        )
        flags: list[Mapping] = [facts.get("trainable", {}), self._trainable]
        if unlike.replicas:
            flags = [replicas.first_of_each(groups, of) for groups, of in zip((saved, here), flags, strict=True)]
            saved, here = (replicas.first_of_each(groups, groups) for groups in (saved, here))
        check_layout(path, saved, here, [*differences(facts.get("settings", {}), self.settings).values()])
        check_trainable(path, flags[0], flags[1], here)
        warn_of_places(path, saved, here)
        if (then := facts["held"]) != self.held.described:
            raise CheckpointError(
                f"{path} was saved with another train step: its tables and iterators were {then} and are "
                f"{self.held.described}. Build what that run built, or choose another folder."
            )

    def restore(self, checkpoint: tf.train.Checkpoint, path: str, facts: Mapping, unlike: Unlike = AS_SAVED) -> None:
        """Restores everything.

        Args:
            checkpoint: Made of `trackables`.
            path: The path of a complete checkpoint that `check` has passed.
            facts: Its JSON.
            unlike: What is not restored as it was saved.

        Raises:
            CheckpointError: If its parts are not those of this run.
        """
        if self._position.problem and not facts["data"]["problem"]:
            raise CheckpointError(
                f"{path} holds a position in the data, and this dataset's cannot be saved: {self._position.problem}. "
                "Use the dataset of that run, or choose another folder."
            )
        self._position.go_to(path, facts["data"], unlike.restart)
        kept = {name: found for name, found in self.groups.items() if name not in unlike.apart}
        left = {*unlike.apart, *(kept if unlike.replicas else ()), *(() if unlike.restart is None else ("position",))}
        try:
            if left:
                others = {name: one for name, one in self.trackables().items() if name not in left}
                tf.train.Checkpoint(**others).restore(path).assert_existing_objects_matched().expect_partial()
            else:
                checkpoint.restore(path).assert_consumed()
        except tf.errors.NotFoundError as error:
            raise CheckpointError(
                f"{path}: its position in the data does not fit this dataset, which is built of other operations "
                "(repeat, shuffle, map, batch, ...) than that of the run. Use the same, or choose another folder."
            ) from error
        except (tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError) as error:
            why = reason(error).removeprefix("Failed to restore dataset iterator from checkpoint: ")
            raise CheckpointError(
                f"{path}: its position in the data does not fit this dataset ({why}). Use the dataset of that run, or "
                "choose another folder."
            ) from error
        if unlike.replicas:
            replicas.restore(path, facts["variables"], kept)
        for variable in self.groups.get("window", ()) if "window" in unlike.apart else ():
            variable.assign(tf.zeros_like(variable))  # No window is open.
        batches = facts["data"]["batches"] if unlike.restart is None else unlike.restart
        self._ahead = batches - facts["counters"]["data"]
        if self._position.problem:
            self._position.skip_to(batches)
        self._actions.restore(path, facts, facts["counters"]["data"])
        try:
            set_generators(facts["random"])
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"{path}: the states of random generators in it are not those of a run ({error}). Use a checkpoint "
                "that Halfstep wrote."
            ) from error

    def _describe(self) -> dict:
        counters = self._counters.read()
        facts: dict[str, Any] = {
            "format": FORMAT,
            "versions": {"tensorflow": tf.__version__, "keras": keras.__version__, "numpy": np.__version__},
            "identity": self.identity,
            "settings": self.settings,
            "counters": {
                "data": counters.data,
                "attempted": counters.attempted,
                "applied": counters.applied,
                "skipped": counters.skipped,
            },
            "data": {
                "batches": counters.data + self._ahead,
                "problem": self._position.problem,
                "caveats": self._position.caveats,
                **self._position.described(),
            },
            "variables": layout(self.groups),
            "trainable": self._trainable,
            "held": self.held.described,
            "changes": self.changes,
            "complete": self.complete,
            **self._actions.save(),
            "random": generators(),
        }
        if self._loss_scaler is not None:
            state = self._loss_scaler.state._asdict()
            # The norms that a guard keeps of each variable are in the checkpoint, too many for a person to read.
            small = {name: value for name, value in state.items() if value.shape.rank < 2}
            facts["loss_scaler"] = {name: value.numpy().tolist() for name, value in small.items()}
        return facts


class _Facts(tf.train.experimental.PythonState):
    """JSON in a checkpoint, which can be read without the model."""

    def __init__(self, describe: Callable[[], dict]):
        self._describe = describe

    def serialize(self) -> str:
        return json.dumps(self._describe())

    def deserialize(self, string_value: str) -> None:
        """Does nothing: `restore` gets the facts, which were read before anything was assigned."""


_ALIGNMENT = 64
"""Bytes. TensorFlow copies memory that begins elsewhere."""
_SHARED = (tf.float16, tf.float32, tf.float64, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8)
"""Dtypes that NumPy passes on without a copy."""


class Copied(NamedTuple):
    """A value of a checkpoint that no step changes.

    Attributes:
        name: Its name in the file.
        slices: Which part of the name's value it is.
        value: An array in the memory of the copy, or a tensor.
        dtype: The value's own: the array may have another of the same size.
    """

    name: str
    slices: str
    value: np.ndarray | tf.Tensor
    dtype: tf.DType

    @property
    def tensor(self) -> tf.Tensor:
        """The value, in the same memory."""
        if isinstance(self.value, tf.Tensor):
            return self.value
        shared = tf.experimental.dlpack.from_dlpack(self.value.__dlpack__())
        return shared if shared.dtype == self.dtype else tf.bitcast(shared, self.dtype)


class HostCopy:
    """Copies all values of a checkpoint. A further copy overwrites the one before.

    New memory takes a system longer to give than a copy takes. So it is asked for once.

    Args:
        checkpoint: Its variables on the host are counted now. What does not fit later gets memory of its own.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint):
        self._checkpoint = checkpoint
        self._memory = np.empty(_size(checkpoint) + _ALIGNMENT, np.uint8)
        self._first = -self._memory.ctypes.data % _ALIGNMENT

    def get_memory(self) -> None:
        """Has the system give all of the memory."""
        np.copyto(self._memory, np.uint8(0))

    def take(self) -> list[Copied]:
        """Copies all values as they are now. Those of other devices, which are copies already, are kept as they are."""
        copied, place = [], self._first
        for name, slices, tensor, fetched in values(self._checkpoint):
            value: np.ndarray | tf.Tensor = tensor
            if tensor.dtype in (*_SHARED, tf.bfloat16) and not fetched:
                source = np.asarray(tensor)
                source = source.view(np.int16) if tensor.dtype == tf.bfloat16 else source
                value = self._room(place, source)
                np.copyto(value, source)
                place += _rounded(source.nbytes)
            elif tensor.dtype != tf.variant and not fetched:  # The variants of iterators are never written again.
                value = tf.constant(tensor.numpy(), tensor.dtype)
            copied.append(Copied(name, slices, value, tensor.dtype))
        return copied

    def _room(self, place: int, like: np.ndarray) -> np.ndarray:
        """An array from a place in the memory on; one of its own where that ends before."""
        part = self._memory[place : place + like.nbytes]
        return part.view(like.dtype).reshape(like.shape) if part.nbytes == like.nbytes else np.empty_like(like)


def _size(checkpoint: tf.train.Checkpoint) -> int:
    found = tf.train.TrackableView(checkpoint).descendants()
    known = [one for one in found if isinstance(one, tf.Variable) and one.shape.is_fully_defined()]
    return sum(_rounded(one.shape.num_elements() * one.dtype.size) for one in known if "CPU" in one.device)


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
