"""What a run is: the options that distinguish it from others, and the other settings of its program, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.backend.datasets import argument, weights
from loops.backend.steps import schedule
from loops.backend.variables import native
from loops.loop.state.operations import kind, spelled
from loops.loop.state.pipeline import bottom_up
from loops.loop.state.values import described, text_of
from loops.step.parts import Part, parts_in
from loops.step.user_steps import named_by

_ARGUMENTS = (
    *("batch_size", "batch_sizes", "buffer_size", "seed", "seed2", "reshuffle_each_iteration", "num_shards", "index"),
    *("size", "shift", "stride", "start", "stop", "step", "cycle_length", "block_length"),
)
_SWITCHES = ("retry", "jit_compile")
_COUNTED = ("Skip", "Take")
"""Operations whose count decides which examples there are; that of a repeat is only how long a run may be."""


def identity(
    train_step: object, *, strategy: tf.distribute.Strategy | None, workers: int = 1, element_spec: Any, run: Mapping
) -> dict:
    """The options that determine what a run computes, as JSON.

    Args:
        train_step: Any callable; its attributes `optimizer` and `loss_scaler` are described if it has them.
        strategy: The loop's.
        workers: The number of processes.
        element_spec: The dataset's.
        run: Names and values by which the user distinguishes runs, from `values.exact`.
    """
    facts: dict[str, Any] = {"replicas": strategy.num_replicas_in_sync if strategy else 1}
    if workers > 1:
        facts["workers"] = workers
    facts["batches"] = str(element_spec)
    loss_scaler = getattr(train_step, "loss_scaler", None)
    if loss_scaler is not None:
        facts["strategy"] = text_of(loss_scaler.strategy)
    optimizer = getattr(train_step, "optimizer", None)
    if optimizer is not None:
        facts["optimizer"] = _describe_optimizer(optimizer)
    for name in ("accumulate", "clip_norm"):
        if hasattr(train_step, name):
            facts[name] = getattr(train_step, name)
    windows = getattr(train_step, "windows", {})
    if isinstance(windows, dict) and len(windows) > 1:
        facts["accumulate"] = str(windows)
    if parts := parts_in(train_step):
        facts["parts"] = {part.name: _of_part(part, train_step) for part in parts}
    clip = getattr(train_step, "clip", None)
    if clip is not None:
        facts["clip"] = text_of(clip)
    facts["run"] = dict(run)
    return as_json(facts)


def _of_part(part: Part, step: Any) -> dict[str, Any]:
    """As of a `TrainStep`."""
    facts: dict[str, Any] = {
        "strategy": text_of(step.scalers[part.name].strategy),
        "optimizer": _describe_optimizer(part.optimizer),
        "every": part.every,
        "clip_norm": part.clip_norm,
    }
    return facts if part.clip is None else {**facts, "clip": text_of(part.clip)}


def settings(train_step: object, dataset: tf.data.Dataset | None, *, jit_compile: bool | None = None) -> dict:
    """The arguments of a program's optimizers, loss scalers and dataset before the first step, as JSON.

    Args:
        train_step: Any callable. In a user's own step, the optimizers and loss scalers that it names are found.
        dataset: The loop's; None if its batches come from elsewhere.
        jit_compile: Whether XLA compiles the step as a whole; None if that is not known.
    """
    facts: dict[str, Any] = {} if jit_compile is None else {"Loop": {"jit_compile": jit_compile}}
    models = named_by(train_step, keras.layers.Layer)
    if models:
        facts["layers"] = {"dtype_policy": _policies(models)}
    for name, optimizer in optimizers_of(train_step).items():
        facts[name] = _describe_optimizer(optimizer)
    own = {name: value for name in _SWITCHES if isinstance(value := getattr(train_step, name, None), bool)}
    if own:
        _add(facts, type(train_step).__name__, own)
    for part in parts_in(train_step):
        if part.teacher is not None:
            _add(facts, f"Part({part.name})", {"momentum": part.momentum})
    for one in reversed(named_by(train_step, scaler.layerwise.Layerwise)):
        _add(facts, type(one).__name__, {"strategy": _of_groups(one), "groups": _groups(one, models)})
    for losses in reversed(named_by(train_step, scaler.PerLoss)):
        _add(facts, type(losses).__name__, {loss: text_of(losses[loss].strategy) for loss in losses.names})
    for one in reversed(named_by(train_step, scaler.LossScaler)):
        said = {"strategy": text_of(one.strategy), "sum_duplicates": one.sum_duplicates, "select": one.select}
        _add(facts, type(one).__name__, said)
    if models:
        facts["formats"] = {"of products": _formats(models)}
    for one in reversed(named_by(train_step, scaler.weights.StochasticRounding)):
        _add(facts, type(one).__name__, {"seed": one.seed})
    for part in bottom_up(dataset) if dataset is not None else ():
        what = kind(type(part).__name__) or type(part).__name__
        names = (*_ARGUMENTS, "count") if what in _COUNTED else _ARGUMENTS
        made_with = {name: _plain(value) for name in names if (value := argument(part, name)) is not None}
        if (shares := weights(part)) is not None:
            _add(facts, "sample_from_datasets", {"weights": shares})
        if made_with:
            _add(facts, spelled(what), made_with)
    return as_json(facts)


def _policies(models: Sequence[keras.layers.Layer]) -> str:
    """The dtype policies of the layers of models."""
    layers = (layer for model in models for layer in scaler.observe.layers_by_path(model).values())
    return ", ".join(sorted({layer.dtype_policy.name for layer in layers}))


def _formats(models: Sequence[keras.layers.Layer]) -> str:
    """What `scaler.formats` made of the layers of models, by their number: names are another process's own."""
    layers: dict[str, list[int]] = {}
    number = 0
    for model in models:
        changed = scaler.formats.changed(model)
        for path in scaler.observe.layers_by_path(model):
            if path in changed:
                layers.setdefault(changed[path], []).append(number)
            number += 1
    return "; ".join(f"{words} in layers {', '.join(map(str, at))}" for words, at in layers.items()) or "Keras's own"


def _of_groups(layerwise: scaler.layerwise.Layerwise) -> str:
    """The strategy of all groups, or that of each in turn."""
    texts = list(map(text_of, layerwise.strategies.values()))
    return texts[0] if len(set(texts)) == 1 else "; ".join(texts)


def _groups(layerwise: scaler.layerwise.Layerwise, models: Sequence[keras.layers.Layer]) -> str:
    """The variables of each group by their numbers in the models, -1 for others: names are another process's own."""
    variables = dict.fromkeys(id(native(one)) for model in models for one in model.variables)
    numbers = {found: number for number, found in enumerate(variables)}
    own = [sorted(numbers.get(id(one), -1) for one in group) for group in layerwise.groups.values()]
    return "; ".join(f"variables {', '.join(map(str, group)) or 'none'}" for group in own)


def optimizers_of(train_step: object) -> dict[str, keras.optimizers.Optimizer]:
    """The optimizers that a step names, by their names in `settings`."""
    found: dict[str, Any] = {}
    for optimizer in reversed(named_by(train_step, keras.optimizers.Optimizer)):
        _add(found, type(optimizer).__name__, optimizer)
    return found


def _describe_optimizer(optimizer: object) -> Any:
    """The class of a Keras optimizer with its configuration; the name of anything else."""
    if isinstance(optimizer, keras.optimizers.Optimizer):
        try:
            config = optimizer.get_config()
        except NotImplementedError:  # By a schedule of one's own, which Keras's `fit` takes.
            config = {name: value for name, value in vars(optimizer).items() if _is_setting(name, value)}
            config["learning_rate"] = schedule(optimizer)
        return {"class": type(optimizer).__name__, **_without_names(config)}
    return getattr(optimizer, "__qualname__", type(optimizer).__qualname__)


def _without_names(config: Mapping) -> dict:
    """A configuration without the names that Keras numbers in each process, also those of optimizers inside."""
    return {
        key: _without_names(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key != "name"
    }


def _is_setting(name: str, value: object) -> bool:
    plain = value is None or isinstance(value, (bool, int, float, str))
    return plain and not name.startswith("_") and name != "built"


def as_json(facts: Mapping) -> dict:
    """The facts written as JSON and read back, as another process sees them."""
    return json.loads(json.dumps(described(facts)))


def _plain(value: Any) -> Any:
    """Arrays, such as the sizes that `rebatch` takes in turn, as lists."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def _add(facts: dict, name: str, value: Any) -> None:
    number = sum(other.split(" ")[0] == name for other in facts) + 1
    facts[name if number == 1 else f"{name} {number}"] = value
