"""What a run is, as JSON: the options that distinguish it from others, and the other settings of its program.

The JSON tells values apart in another process: none holds the address of an object.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
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
        layers = (layer for model in models for layer in scaler.observe.layers_by_path(model).values())
        facts["layers"] = {"dtype_policy": ", ".join(sorted({layer.dtype_policy.name for layer in layers}))}
    for name, optimizer in optimizers_of(train_step).items():
        facts[name] = _describe_optimizer(optimizer)
    own = {name: value for name in _SWITCHES if isinstance(value := getattr(train_step, name, None), bool)}
    if own:
        _add(facts, type(train_step).__name__, own)
    for part in parts_in(train_step):
        if part.teacher is not None:
            _add(facts, f"Part({part.name})", {"momentum": part.momentum})
    for one in reversed(named_by(train_step, scaler.layerwise.Layerwise)):
        texts = list(map(text_of, one.strategies.values()))
        of_all = texts[0] if len(set(texts)) == 1 else "; ".join(texts)
        _add(facts, type(one).__name__, {"strategy": of_all, "groups": _groups(one, models)})
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
        made_with = {name: value for name in names if (value := argument(part, name)) is not None}
        # Such as the sizes that `rebatch` takes in turn.
        made_with = {name: one.tolist() if isinstance(one, np.ndarray) else one for name, one in made_with.items()}
        if (shares := weights(part)) is not None:
            _add(facts, "sample_from_datasets", {"weights": shares})
        if made_with:
            _add(facts, spelled(what), made_with)
    return as_json(facts)


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
            plain = (bool, int, float, str, type(None))
            public = {
                name: one for name, one in vars(optimizer).items() if not name.startswith("_") and name != "built"
            }
            config = {name: one for name, one in public.items() if isinstance(one, plain)}
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


def as_json(facts: Mapping) -> dict:
    """The facts written as JSON and read back, as another process sees them."""
    return json.loads(json.dumps(as_plain(facts)))


def _add(facts: dict, name: str, value: Any) -> None:
    number = sum(other.split(" ")[0] == name for other in facts) + 1
    facts[name if number == 1 else f"{name} {number}"] = value


_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)
_NOT_WHAT_IT_HOLDS = (tf.data.Dataset, keras.layers.Layer, tf.Module)
"""Their text says nothing of their contents."""


class NoText(Exception):
    """A value that no text tells from others. Its argument is the value."""


def exact(value: object) -> Any:
    """A value as JSON, by which it is told from every other one; arrays by dtype, shape and a digest.

    Raises:
        NoText: If a part of it has no text that another process would read the same, such as a function.
    """

    def unknown(part: object) -> Any:
        raise NoText(part)

    try:
        return _as_json(value, unknown)
    except RecursionError:
        raise NoText(value) from None


def as_plain(value: object) -> Any:
    """A value as JSON, in which parts that no text tells apart have the name of their class, or of the function."""
    try:
        return _as_json(value, _name)
    except RecursionError:  # It holds itself.
        return _name(value)


def text_of(value: object) -> Any:
    """The value's own text; where that holds an address, its description."""
    text = repr(value)
    return as_plain(value) if _ADDRESS.search(text) else text


def _name(value: object) -> str:
    return getattr(value, "__qualname__", type(value).__qualname__)


def _as_json(value: Any, unknown: Callable[[object], Any]) -> Any:
    def inside(part: object) -> Any:
        return _as_json(part, unknown)

    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name or value.value}"
    if isinstance(value, Mapping):
        return _by_name(value, unknown)
    if isinstance(value, (set, frozenset)):
        return sorted(map(inside, value), key=json.dumps)
    if isinstance(value, (list, tuple)):
        return [inside(part) for part in value]
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray)):
        return _digest(np.frombuffer(value, np.uint8))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"class": type(value).__qualname__, **_by_name(fields, unknown)}
    if isinstance(value, _COMPOSITE):
        return [inside(part) for part in tf.nest.flatten(value, expand_composites=True)]
    if hasattr(type(value), "__array__"):
        return _of_array(value, unknown)
    return _of_object(value, unknown)


def _by_name(values: Mapping, unknown: Callable[[object], Any]) -> dict[str, Any]:
    def name(key: Any) -> str:
        found = _as_json(key, unknown)
        return found if isinstance(found, str) else json.dumps(found)

    found = {name(key): _as_json(value, unknown) for key, value in values.items()}
    if len(found) < len(values):
        unknown(values)
    return found


def _of_array(value: Any, unknown: Callable[[object], Any]) -> Any:
    try:
        array = np.asarray(value)
    except Exception:  # Of a symbolic tensor each library raises its own.
        return unknown(value)
    if array.ndim == 0:
        item = array.item()
        return unknown(value) if hasattr(type(item), "__array__") else _as_json(item, unknown)
    if array.dtype == object:
        return [_as_json(part, unknown) for part in array.tolist()]
    return _digest(array)


def _digest(array: np.ndarray) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
    return f"{array.dtype.name}{list(array.shape)} {digest}"


def _of_object(value: Any, unknown: Callable[[object], Any]) -> Any:
    if isinstance(value, _NOT_WHAT_IT_HOLDS):
        return unknown(value)
    if hasattr(type(value), "get_config") and not isinstance(value, type):
        try:
            return {"class": type(value).__qualname__, **_by_name(value.get_config(), unknown)}
        except NotImplementedError:
            pass
    text = repr(value)
    if not _ADDRESS.search(text):
        return text
    attributes = _attributes(value)
    if attributes is None:
        return unknown(value)
    return {"class": type(value).__qualname__, **_by_name(attributes, unknown)}


def _attributes(value: Any) -> dict | None:
    """The attributes that make up all of an object, as pickle would take them; None if there is more to it."""
    if type(value) is object or type(value).__reduce__ is not object.__reduce__:
        return None
    try:
        _, arguments, state, *items = value.__reduce_ex__(2)
    except Exception:  # A function, an open file, ...
        return None
    whole = len(arguments) == 1 and not any(item is not None for item in items)
    return (state or {}) if whole and isinstance(state, (dict, type(None))) else None
