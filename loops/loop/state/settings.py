"""Settings that a checkpoint does not restore: of a run's optimizers and loss scalers, and of its dataset."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.backend.datasets import argument, weights
from loops.backend.variables import native
from loops.loop.state.change import Changes
from loops.loop.state.identity import as_json, check_identity, describe_optimizer, flat, same
from loops.loop.state.operations import kind, spelled
from loops.loop.state.pipeline import bottom_up
from loops.loop.state.values import text_of
from loops.step.parts import parts_in
from loops.step.user_steps import named_by
from loops.support.errors import CheckpointError

_ARGUMENTS = (
    *("batch_size", "batch_sizes", "buffer_size", "seed", "seed2", "reshuffle_each_iteration", "num_shards", "index"),
    *("size", "shift", "stride", "start", "stop", "step", "cycle_length", "block_length"),
)
_UNSET_SEED = 87654321
"""What TensorFlow pairs with the seed of an operation where no global seed is set."""
_OF_A_STEP = ("retry", "jit_compile")
_COUNTED = ("Skip", "Take")
"""Operations whose count decides which examples there are; that of a repeat is only how long a run may be."""


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
    for name, optimizer in _optimizers(train_step).items():
        facts[name] = describe_optimizer(optimizer)
    own = {name: value for name in _OF_A_STEP if isinstance(value := getattr(train_step, name, None), bool)}
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


def differences(saved: Mapping, here: Mapping) -> dict[str, str]:
    """The settings that both programs have with different values, by name, as sentences with both."""
    then, now = _named_as_given(saved), _named_as_given(here)
    names = [name for name in then if name in now and not same(then[name], now[name])]
    return {name: f"{name} was {then[name]!r} and is {now[name]!r}" for name in names}


def meant_changes(path: str, saved: Mapping, identity: Mapping, here: Mapping, meant: Changes) -> dict[str, str]:
    """What of a run's identity is meant to differ, as `check_identity` returns it.

    Args:
        path: Of the checkpoint.
        saved: The facts in it.
        identity: That of this run.
        here: The settings of this program.
        meant: What may differ.

    Raises:
        CheckpointError: If something else differs; the message begins with the dtype policies, where they do.
        scaler.InvalidArgument: If something else differs, and one of the names is that of no setting.
    """
    policy = differences(saved.get("settings", {}), here).get("layers.dtype_policy")
    try:
        return check_identity(path, saved["identity"], identity, meant, [policy] if policy else [])
    except CheckpointError:
        # It may be a misspelled name of what differs.
        known = (saved["identity"], saved.get("settings", {}), identity, here, {"Loop.jit_compile": None})
        meant.check(name for one in known for name in flat(one))
        raise


def other_rates(train_step: object, saved: Mapping) -> list[str]:
    """What the learning rates are that changed schedules give, and what they were to be, as sentences.

    Args:
        train_step: Any callable, whose optimizers are restored.
        saved: What `settings` returned in the program that saved them. It tells Keras's own schedules.
    """
    found = []
    for name, optimizer in _optimizers(train_step).items():
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError, tf.errors.OpError):
            then = saved[name]["learning_rate"]
            schedule = getattr(keras.optimizers.schedules, then["class_name"]).from_config(then["config"])
            before, now = float(schedule(optimizer.iterations)), float(optimizer.learning_rate)
            at = f"at update {int(optimizer.iterations)} of {name}"
            found += [f"{at} the learning rate was to be {before:g}, and is {now:g}."] if not same(before, now) else []
    return found


def _optimizers(train_step: object) -> dict[str, keras.optimizers.Optimizer]:
    """The optimizers that a step names, by their names in `settings`."""
    found: dict[str, Any] = {}
    for optimizer in reversed(named_by(train_step, keras.optimizers.Optimizer)):
        _add(found, type(optimizer).__name__, optimizer)
    return found


def _named_as_given(facts: Mapping) -> dict[str, Any]:
    """Settings without nested dicts, with both seeds of an operation of a dataset by the names of a program."""
    found = flat(facts)
    for name in [name for name in found if f"{name}2" in found and name.endswith(".seed")]:
        seed, found[name] = found[name], found.pop(f"{name}2")
        found[f"the global seed (tf.random.set_seed) of {name[:-5]}"] = None if seed == _UNSET_SEED else seed
    return found


def _plain(value: Any) -> Any:
    """Arrays, such as the sizes that `rebatch` takes in turn, as lists."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def _add(facts: dict, name: str, value: Any) -> None:
    number = sum(other.split(" ")[0] == name for other in facts) + 1
    facts[name if number == 1 else f"{name} {number}"] = value
