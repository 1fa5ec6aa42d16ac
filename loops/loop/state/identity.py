"""What distinguishes one run from another, so that a run does not resume from the checkpoints of a different one."""

from __future__ import annotations

import collections
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from loops.backend.steps import schedule
from loops.loop.state.change import NO_CHANGES, Changes, way_out
from loops.loop.state.trainable import slots_of_others
from loops.loop.state.values import described, text_of
from loops.step.parts import Part, parts_in
from loops.support.errors import CheckpointError, ResumeWarning

_NUMBER = re.compile(r"^([^/]*?)_\d+/")


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
        facts["optimizer"] = describe_optimizer(optimizer)
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
        "optimizer": describe_optimizer(part.optimizer),
        "every": part.every,
        "clip_norm": part.clip_norm,
    }
    return facts if part.clip is None else {**facts, "clip": text_of(part.clip)}


def check_identity(
    path: str, saved: Mapping, here: Mapping, meant: Changes = NO_CHANGES, besides: Sequence[str] = ()
) -> dict[str, str]:
    """Compares two identities.

    Args:
        path: Of the checkpoint.
        saved: That in it.
        here: That of this run.
        meant: What may differ.
        besides: Sentences about settings that differ, too, for the message.

    Returns:
        What differs and is meant to, by name, as sentences.

    Raises:
        CheckpointError: If they differ otherwise; the message names what does.
    """
    kinds = _step_of(saved), _step_of(here)
    apart = () if kinds[0] == kinds[1] else _OF_A_STEP
    then, now = (flat({name: value for name, value in facts.items() if name not in apart}) for facts in (saved, here))
    names = [name for name in {**then, **now} if not same(then.get(name), now.get(name))]
    said = {name: f"{name} was {then.get(name)!r} and is {now.get(name)!r}" for name in names}
    differences = [sentence for name, sentence in said.items() if not meant.are(name)]
    if apart:
        also = f" Besides, {'; '.join(differences)}." if differences else ""
        raise CheckpointError(
            f"{path} belongs to another run: it holds the variables of {kinds[0]}, and this run has {kinds[1]}, which "
            f"keeps them otherwise.{also} Resume with the kind of step of that run, or choose another folder."
        )
    if differences:
        way = way_out(names, meant, then, now)
        raise CheckpointError(
            f"{path} belongs to another run: {'; '.join([*besides, *differences])}. Use the options of that run, or "
            f"choose another folder.{way}"
        )
    return said


_OF_A_STEP = ("strategy", "optimizer", "accumulate", "clip_norm", "clip", "parts")
"""The facts that only some kinds of steps have."""


def _step_of(facts: Mapping) -> str:
    """What a train step is called, as far as an identity tells."""
    if "parts" in facts:
        return f"an hs.ComposedStep of {', '.join(map(repr, sorted(facts['parts'])))}"
    return "an hs.TrainStep" if set(_OF_A_STEP[:4]) <= set(facts) else "a step of your own"


def check_layout(path: str, saved: Mapping, here: Mapping, other_settings: Sequence[str] = ()) -> None:
    """Compares what `variables.layout` returned then and now. Names may differ: Keras numbers layers per process.

    Args:
        path: Of the checkpoint.
        saved: What `variables.layout` returned then.
        here: What it returns now.
        other_settings: Sentences about settings that differ, too: a strategy has variables of its own.

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
        settings = f" Its settings were others, too: {'; '.join(other_settings)}." if other_settings else ""
        raise CheckpointError(
            f"{path} was saved with another model, optimizer, strategy or train step: {what}.{settings} Build what "
            "that run built, or choose another folder."
        )


def warn_of_places(path: str, saved: Mapping, here: Mapping) -> None:
    """Warns where variables changed places, or slots are those of other weights, as far as names tell.

    Args:
        path: Of the checkpoint.
        saved: What `variables.layout` returned then, which `check_layout` has passed.
        here: What it returns now.
    """
    for group, now in here.items():
        names = [[entry[0] for entry in entries] for entries in (saved[group], now)]
        # Keras also numbers a Sequential, whose name is a prefix of its variables' names.
        moved = _changed_places(*names) or _changed_places(
            *([_NUMBER.sub(r"\1/", name) for name in own] for own in names)
        )
        if moved:
            pairs = ", ".join(f"{names[1][place]!r} that of {names[0][place]!r}" for place in moved[:3])
            warnings.warn(
                f"{path} holds the variables of its {group} in another order. Values are assigned by position, so each "
                f"gets that of another one: {pairs}{', ...' if moved[3:] else ''}. Build the layers, and list "
                "the losses of a PerLoss, in the order of that run.",
                ResumeWarning,
                stacklevel=5,
            )
            return
    others = slots_of_others(saved, here)
    if others:
        pairs = ", ".join(f"{now!r} that of {then!r}" for then, now in others[:3])
        warnings.warn(
            f"{path} holds slots of other weights. By its place each gets the value of another one: {pairs}"
            f"{', ...' if others[3:] else ''}. Train the weights of that run, in its order, or choose another folder.",
            ResumeWarning,
            stacklevel=5,
        )


def _changed_places(then: list[str], now: list[str]) -> list[int]:
    """The positions whose names were permuted in a cycle.

    If Keras only numbers layers differently, all names shift in one direction and no cycle closes.
    """
    counts = collections.Counter(then), collections.Counter(now)
    places = {name: place for place, name in enumerate(now)}
    to = {place: places[name] for place, name in enumerate(then) if counts[0][name] == counts[1][name] == 1}

    def comes_back(place: int) -> bool:
        at = to.get(place)
        while at is not None and at != place:
            at = to.get(at)
        return at == place

    return [place for place, at in to.items() if at != place and comes_back(place)]


def same(then: object, now: object) -> bool:
    """Whether two values are the same. NaN equals NaN, also in lists."""
    return then == now or json.dumps(then) == json.dumps(now)


def describe_optimizer(optimizer: object) -> Any:
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


def flat(facts: Mapping, prefix: str = "") -> dict[str, Any]:
    """A dict without nested dicts: the names of a path are joined with dots."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        found.update(flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value})
    return found


def _variable(entry: list) -> str:
    name, dtype, shape = entry
    return f"{name} {dtype}{shape}"
