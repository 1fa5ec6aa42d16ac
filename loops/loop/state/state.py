"""A run's complete state between two steps: what a checkpoint holds, and its copy in host memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from loops.backend.generators import generators, set_generators
from loops.loop.results import CounterVariables
from loops.loop.state import regrouped
from loops.loop.state.actions import ActionStates
from loops.loop.state.compared import AS_SAVED, Unlike, differences
from loops.loop.state.folder import FORMAT
from loops.loop.state.position import Position, SourcePosition
from loops.loop.state.resources import StepResources
from loops.loop.state.variables import Groups, check_layout, check_trainable, layout, warn_of_places
from loops.support.errors import CheckpointError
from loops.support.written import reason


@dataclasses.dataclass(kw_only=True)
class RunState:
    """Variables on every replica, tables, iterators, counters, the position, random generators and the actions' state.

    An action's state is saved if it has two methods: `save_state()` returns a value that JSON can hold, and
    `load_state(value)` takes it before the first step of a resumed run.

    Attributes:
        groups: From `variable_groups`.
        held: The step's tables and iterators.
        counters: The loop's.
        position: The loop's position in its dataset.
        actions: The states of the loop's.
        identity: From `described.identity`, and `settings` from there, too: see `compared` for what must be the same.
        settings: The program's other settings.
        trainable: From `trainable_flags`.
        loss_scaler: The train step's, or None; its state is described in the checkpoint.
        changes: The steps from which the run went on with other settings, and what they were.
        complete: Whether the run is over: at its goal, or ended by an action.
    """

    groups: Groups
    held: StepResources
    counters: CounterVariables
    position: Position | SourcePosition
    actions: ActionStates
    identity: Mapping
    settings: Mapping
    trainable: Mapping[str, str]
    loss_scaler: Any = None
    changes: list[dict] = dataclasses.field(default_factory=list)
    complete: bool = False
    _ahead: int = 0
    """Batches of the dataset beyond the counters' own: they may once have had another size."""

    def trackables(self) -> dict:
        """The objects to give to `tf.train.Checkpoint`."""
        saved: dict[str, Any] = {group: list(variables) for group, variables in self.groups.items()}
        saved["counters"] = [self.counters.data, self.counters.attempted, self.counters.applied]
        saved["facts"] = _Facts(self._describe)
        saved |= self.position.trackables()
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
        flags: list[Mapping] = [facts["trainable"], self.trainable]
        if unlike.replicas:
            flags = [regrouped.first_of_each(groups, of) for groups, of in zip((saved, here), flags, strict=True)]
            saved, here = (regrouped.first_of_each(groups, groups) for groups in (saved, here))
        check_layout(path, saved, here, [*differences(facts["settings"], self.settings).values()])
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
        if self.position.problem and not facts["data"]["problem"]:
            raise CheckpointError(
                f"{path} holds a position in the data, and this dataset's cannot be saved: {self.position.problem}. "
                "Use the dataset of that run, or choose another folder."
            )
        self.position.go_to(path, facts["data"], unlike.restart)
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
            regrouped.restore(path, facts["variables"], kept)
        for variable in self.groups.get("window", ()) if "window" in unlike.apart else ():
            variable.assign(tf.zeros_like(variable))  # No window is open.
        if "loss_scaler" in unlike.apart and "loss_scaler" in facts:
            self.loss_scaler.assign_scale(facts["loss_scaler"]["loss_scale"])
        batches = facts["data"]["batches"] if unlike.restart is None else unlike.restart
        self._ahead = batches - facts["counters"]["data"]
        if self.position.problem:
            self.position.skip_to(batches)
        self.actions.restore(path, facts, facts["counters"]["data"])
        try:
            set_generators(facts["random"])
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"{path}: the states of random generators in it are not those of a run ({error}). Use a checkpoint "
                "that Halfstep wrote."
            ) from error

    def _describe(self) -> dict:
        counters = self.counters.read()
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
                "problem": self.position.problem,
                "caveats": self.position.caveats,
                **self.position.described(),
            },
            "variables": layout(self.groups),
            "trainable": self.trainable,
            "held": self.held.described,
            "changes": self.changes,
            "complete": self.complete,
            **self.actions.save(),
            "random": generators(),
        }
        if self.loss_scaler is not None:
            state = self.loss_scaler.state._asdict()
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
