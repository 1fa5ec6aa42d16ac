"""A run's complete state between two steps: what a checkpoint holds."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from loops.loop.counters import CounterVariables
from loops.loop.state.position import Position
from loops.loop.state.randomness import generators, set_generators
from loops.loop.state.resources import StepResources
from loops.loop.state.variables import Groups, layout
from loops.support.errors import CheckpointError, ResumeWarning
from loops.support.written.acting import named

_FORMAT = 1


class RunState:
    """Variables on every replica, tables, iterators, counters, the position, random generators and the actions' state.

    An action's state is saved if it has two methods: `save_state()` returns a value that JSON can hold, and
    `load_state(value)` takes it before the first step of a resumed run. Actions are identified by their class and their
    order within it.

    Args:
        groups: From `variable_groups`.
        held: The step's tables and iterators.
        counters: The loop's.
        position: The loop's position in its dataset.
        actions: The loop's.
        identity: From `identity.identity`: must be the same in a run that resumes.
        settings: From `settings.settings`: may differ in a run that resumes, with a warning.
        loss_scaler: The train step's, or None; its state is described in the checkpoint.
    """

    def __init__(
        self,
        *,
        groups: Groups,
        held: StepResources,
        counters: CounterVariables,
        position: Position,
        actions: Iterable,
        identity: Mapping,
        settings: Mapping,
        loss_scaler: Any = None,
    ):
        self.groups, self.held = groups, held
        self.identity, self.settings = dict(identity), dict(settings)
        self._counters, self._position, self._loss_scaler = counters, position, loss_scaler
        self._actions = _named(actions)
        self._facts = _Facts(self._describe)

    def trackables(self) -> dict:
        """The objects to give to `tf.train.Checkpoint`."""
        saved: dict[str, Any] = {group: list(variables) for group, variables in self.groups.items()}
        saved["counters"] = [self._counters.data, self._counters.attempted, self._counters.applied]
        saved["facts"] = self._facts
        if not self._position.problem:
            saved["position"] = self._position.iterator
        if self.held.saved:
            saved["held"] = self.held.saved
        return saved

    def restore(self, checkpoint: tf.train.Checkpoint, path: str, facts: Mapping) -> None:
        """Restores everything.

        Args:
            checkpoint: Made of `trackables`.
            path: The path of a complete checkpoint of this run.
            facts: Its JSON.

        Raises:
            CheckpointError: If its parts are not those of this run.
        """
        if self._position.problem and not facts["data"]["problem"]:
            raise CheckpointError(
                f"{path} holds a position in the data, and this dataset's cannot be saved: {self._position.problem}. "
                "Use the dataset of that run, or choose another folder."
            )
        if self.held.saved and "held" not in facts:
            warnings.warn(
                f"{path} was saved by a version that did not save the tables and iterators of a train step: "
                f"{', '.join(self.held.described)} start again.",
                ResumeWarning,
                stacklevel=3,
            )
            checkpoint = tf.train.Checkpoint(**{k: v for k, v in self.trackables().items() if k != "held"})
        elif (then := facts.get("held", [])) != self.held.described:
            raise CheckpointError(
                f"{path} was saved with another train step: its tables and iterators were {then} and are "
                f"{self.held.described}. Build what that run built, or choose another folder."
            )
        try:
            checkpoint.restore(path).assert_consumed()
        except tf.errors.NotFoundError as error:
            raise CheckpointError(
                f"{path}: its position in the data does not fit this dataset, which is built of other operations "
                "(repeat, shuffle, map, batch, ...) than that of the run. Use the same, or choose another folder."
            ) from error
        if self._position.problem:
            self._position.skip_to(facts["data"]["batches"])
        for name, action in self._actions.items():
            if name in facts["actions"]:
                with named(action):
                    action.load_state(facts["actions"][name])
        set_generators(facts["random"])

    def _describe(self) -> dict:
        counters = self._counters.read()
        facts: dict[str, Any] = {
            "format": _FORMAT,
            "versions": {"tensorflow": tf.__version__, "keras": keras.__version__, "numpy": np.__version__},
            "identity": self.identity,
            "settings": self.settings,
            "counters": {
                "data": counters.data,
                "attempted": counters.attempted,
                "applied": counters.applied,
                "skipped": counters.skipped,
            },
            "data": {"batches": counters.data, "problem": self._position.problem, "caveats": self._position.caveats},
            "variables": layout(self.groups),
            "held": self.held.described,
            "actions": {name: action.save_state() for name, action in self._actions.items()},
            "random": generators(),
        }
        if self._loss_scaler is not None:
            state = self._loss_scaler.state._asdict()
            facts["loss_scaler"] = {name: value.numpy().tolist() for name, value in state.items()}
        return facts


class _Facts(tf.train.experimental.PythonState):
    """JSON in a checkpoint, which can be read without the model."""

    def __init__(self, describe: Callable[[], dict]):
        self._describe = describe

    def serialize(self) -> str:
        return json.dumps(self._describe())

    def deserialize(self, string_value: str) -> None:
        """Does nothing: `restore` gets the facts, which were read before anything was assigned."""


def _named(actions: Iterable) -> dict[str, Any]:
    named: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for action in actions:
        if hasattr(action, "save_state") and hasattr(action, "load_state"):
            kind = type(action).__qualname__
            counts[kind] = counts.get(kind, 0) + 1
            named[kind if counts[kind] == 1 else f"{kind} {counts[kind]}"] = action
    return named
