"""What tells one run from another, so that a folder is not taken for that of a different one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from loops.support.errors import CheckpointError


def identity(
    train_step: object, *, strategy: tf.distribute.Strategy | None, workers: int = 1, element_spec: Any, run: Mapping
) -> dict:
    """The options that decide what a run computes, as JSON.

    Args:
        train_step: Its `optimizer` and `loss_scaler` are described, where it has them.
        strategy: The loop's.
        workers: How many processes its replicas are in.
        element_spec: The dataset's.
        run: What the user tells runs apart by.
    """
    facts: dict[str, Any] = {"replicas": strategy.num_replicas_in_sync if strategy else 1}
    if workers > 1:
        facts["workers"] = workers
    facts["batches"] = str(element_spec)
    loss_scaler = getattr(train_step, "loss_scaler", None)
    if loss_scaler is not None:
        facts["strategy"] = repr(loss_scaler.strategy)
    optimizer = getattr(train_step, "optimizer", None)
    if optimizer is not None:
        facts["optimizer"] = _describe(optimizer)
    for name in ("accumulate", "clip_norm"):
        if hasattr(train_step, name):
            facts[name] = getattr(train_step, name)
    clip = getattr(train_step, "clip", None)
    if clip is not None:
        facts["clip"] = repr(clip)
    facts["run"] = dict(run)
    return json.loads(json.dumps(facts, default=_told_apart_by))


def check_identity(path: str, saved: Mapping, here: Mapping) -> None:
    """Compares two identities.

    Raises:
        CheckpointError: If they differ; the message names what does.
    """
    then, now = _flat(saved), _flat(here)
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    differences = [f"{name} was {then.get(name)!r} and is {now.get(name)!r}" for name in names]
    if differences:
        raise CheckpointError(
            f"{path} belongs to another run: {'; '.join(differences)}. Go on with the options of that run, or choose "
            "another folder."
        )


def check_layout(path: str, saved: Mapping, here: Mapping) -> None:
    """Compares what `variables.layout` returned then and now. Names may differ: Keras numbers layers by process.

    Raises:
        CheckpointError: If a variable is missing, added, or has another shape or dtype.
    """
    for group in [*saved, *(name for name in here if name not in saved)]:
        then, now = saved.get(group, []), here.get(group, [])
        wrong = next(
            (place for place, (old, new) in enumerate(zip(then, now, strict=False)) if old[1:] != new[1:]), None
        )
        if wrong is not None:
            what = f"variable {wrong} of its {group} was {_variable(then[wrong])} and is {_variable(now[wrong])}"
        elif len(then) != len(now):
            what = f"its {group} had {len(then)} variables and has {len(now)}"
        else:
            continue
        raise CheckpointError(
            f"{path} was saved with another model, optimizer or train step: {what}. Build what that run built, or "
            "choose another folder."
        )


def _describe(optimizer: object) -> Any:
    if isinstance(optimizer, keras.optimizers.Optimizer):
        config = {name: value for name, value in optimizer.get_config().items() if name != "name"}
        return {"class": type(optimizer).__name__, **config}
    return getattr(optimizer, "__qualname__", type(optimizer).__qualname__)


def _told_apart_by(value: object) -> Any:
    """What JSON holds in the place of a value that it cannot hold."""
    if hasattr(value, "item"):
        return value.item()
    return type(value).__qualname__  # A repr may hold an address, which differs between processes.


def _flat(facts: Mapping, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        flat.update(_flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value})
    return flat


def _variable(entry: list) -> str:
    name, dtype, shape = entry
    return f"{name} {dtype}{shape}"
