"""The variables of a run: listed so that another process can match them, and compared with those of a checkpoint."""

from __future__ import annotations

import collections
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from loops.backend import captured
from loops.backend.variables import components
from loops.step.user_steps import models_of
from loops.support.errors import CheckpointError, ResumeWarning

Groups = dict[str, list[tf.Variable]]

_PARTS: dict[str, Callable[[Any], Iterable]] = {
    "model": lambda part: part.variables,
    "optimizer": lambda part: getattr(part, "variables", ()),
    "masters": lambda part: part.weights,
    "loss_scaler": lambda part: part.variables,
    "window": lambda part: part.variables,
}
_REST = "step"


def variable_groups(train_step: object, concrete: tf.types.experimental.ConcreteFunction) -> Groups:
    """Every variable that a train step reads or writes, on every replica, in an order that depends only on the program.

    Variables of the step's attributes `model`, `optimizer`, `masters`, `loss_scaler` and `window` are listed under
    these names; all others that its graph captured under "step". If a variable has a component on each replica, every
    component is listed: `tf.train.Checkpoint` would save only the first, although BatchNorm's statistics and the sums
    of a window differ between replicas.

    Args:
        train_step: Any callable.
        concrete: Its concrete function.
    """
    groups: Groups = {}
    seen: set[int] = set()

    def add(name: str, found: Iterable) -> None:
        own = groups.setdefault(name, [])
        for component in (part for variable in found for part in components(variable)):
            if id(component) not in seen:
                seen.add(id(component))
                own.append(component)

    for name, variables_of in _PARTS.items():
        part = getattr(train_step, name, None)
        if part is not None:
            add(name, variables_of(part))
    # A graph's variables are a set without order; its captures are in the order of the trace.
    by_handle = {id(part.handle): part for variable in concrete.variables for part in components(variable)}
    by_handle |= captured.owners(captured.variables_by_handle(concrete, by_handle))
    rest = (by_handle[id(handle)] for handle in concrete.captured_inputs if id(handle) in by_handle)
    add(_REST, captured.without_tokens(part for part in rest if id(part) not in seen))
    return {name: found for name, found in groups.items() if found}


def layout(groups: Groups) -> dict[str, list]:
    """Name, dtype and shape of each variable, as JSON."""

    def facts(variable: tf.Variable) -> list:
        return [variable.name.split(":")[0], variable.dtype.name, variable.shape.as_list()]

    return {group: list(map(facts, found)) for group, found in groups.items()}


_NUMBER = re.compile(r"^([^/]*?)_\d+/")
_WORDS = {"1": "trainable", "0": "frozen"}
"""What the characters of `trainable_flags` say of a weight."""


def trainable_flags(train_step: object, groups: Groups) -> dict[str, str]:
    """For each group a character for each variable: 1 for a weight that is trainable, 0 if it is not, - for others.

    Args:
        train_step: Any callable; the weights of the models that it names are known.
        groups: Of its variables.
    """
    flags = {
        id(part): "1" if weight.trainable else "0"
        for model in models_of(train_step)
        for weight in model.weights
        for part in components(weight)
    }
    return {group: "".join(flags.get(id(one), "-") for one in found) for group, found in groups.items()}


def check_layout(path: str, saved: Mapping, here: Mapping, other_settings: Sequence[str] = ()) -> None:
    """Compares what `layout` returned then and now. Names may differ: Keras numbers layers per process.

    Args:
        path: Of the checkpoint.
        saved: What `layout` returned then.
        here: What it returns now.
        other_settings: Sentences about settings that differ, too: a strategy has variables of its own.

    Raises:
        CheckpointError: If a variable is missing, added, or has another shape or dtype.
    """
    for group in {**saved, **here}:
        then, now = saved.get(group, []), here.get(group, [])
        pairs = enumerate(zip(then, now, strict=False))
        other = next(((place, old, new) for place, (old, new) in pairs if old[1:] != new[1:]), None)
        if other is not None:
            place, *both = other
            was, becomes = (f"{name} {dtype}{shape}" for name, dtype, shape in both)
            what = f"variable {place} of its {group} was {was} and is {becomes}"
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
        saved: What `layout` returned then, which `check_layout` has passed.
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
    others = _slots_of_others(saved, here)
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


def check_trainable(
    path: str, saved: Mapping[str, Sequence[str]], here: Mapping[str, Sequence[str]], layout: Mapping[str, list]
) -> None:
    """Compares which weights are trained.

    Args:
        path: Of the checkpoint.
        saved: Its flags; empty of one that has none.
        here: As from `trainable_flags`.
        layout: The names of the variables.

    Raises:
        CheckpointError: If a weight was trained and is frozen, or the other way.
    """
    changed = [
        f"{layout[group][place][0]!r} was {_WORDS[then]} and is {_WORDS[now]}"
        for group, flags in here.items()
        for place, (then, now) in enumerate(zip(saved.get(group, ""), flags, strict=False))
        if then != now and {then, now} <= _WORDS.keys()
    ]
    if changed:
        more = f"; and {len(changed) - 3} more" if changed[3:] else ""
        raise CheckpointError(
            f"{path} was saved while other weights were trained: {'; '.join(changed[:3])}{more}. Set layer.trainable "
            "as that run had it, or choose another folder and load the weights there."
        )


def _slots_of_others(saved: Mapping[str, list], here: Mapping[str, list]) -> list[tuple[str, str]]:
    """Slots and masters that would get the value of another weight's, as far as names tell: theirs then and now.

    Keras names a slot by the path of its weight. Weights are compared by their places, since Keras numbers layers by
    process.

    Args:
        saved: What `layout` returned then; of the same shapes.
        here: What it returns now.
    """
    weights = _places(saved), _places(here)
    found = []
    for group, entries in here.items():
        for (then, *_), (now, *_) in zip(saved[group], entries, strict=True):
            owners = [_owner(name, places, group) for name, places in zip((then, now), weights, strict=True)]
            if None not in owners and owners[0] != owners[1]:
                found.append((then, now))
    return found


def _places(layout: Mapping[str, list]) -> dict[str, tuple[str, int]]:
    """Where the variable of each name is, as a slot spells the name."""
    places: dict[str, tuple[str, int]] = {}
    for group, entries in layout.items():
        for place, (name, *_) in enumerate(entries):
            places.setdefault(name.replace("/", "_"), (group, place))
    return places


def _owner(name: str, places: Mapping[str, tuple[str, int]], group: str) -> tuple[str, int] | None:
    """Where the weight is that a slot or a master is of; None of any other variable."""
    if group == "masters":
        return places.get(name.replace("/", "_"))
    words = name.rpartition("/")[2].split("_")
    starts = ("_".join(words[:count]) for count in range(len(words) - 1, 0, -1))
    return next((places[start] for start in starts if start in places), None)
