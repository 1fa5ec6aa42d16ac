"""Which weights a run trains, and of which weight each slot of an optimizer is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loops.loop.state.variables import Groups, components
from loops.step.user_steps import models_of
from loops.support.errors import CheckpointError

_TRAINED, _FROZEN, _UNKNOWN = "1", "0", "-"


def trainable_flags(train_step: object, groups: Groups) -> dict[str, str]:
    """For each group a character for each variable: 1 for a weight that is trainable, 0 if it is not, - for others.

    Args:
        train_step: Any callable; the weights of the models that it names are known.
        groups: Of its variables.
    """
    flags = {
        id(part): _TRAINED if weight.trainable else _FROZEN
        for model in models_of(train_step)
        for weight in model.weights
        for part in components(weight)
    }
    return {group: "".join(flags.get(id(one), _UNKNOWN) for one in found) for group, found in groups.items()}


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
        f"{layout[group][place][0]!r} was {_words[then]} and is {_words[now]}"
        for group, flags in here.items()
        for place, (then, now) in enumerate(zip(saved.get(group, ""), flags, strict=False))
        if then != now and _UNKNOWN not in (then, now)
    ]
    if changed:
        more = f"; and {len(changed) - 3} more" if changed[3:] else ""
        raise CheckpointError(
            f"{path} was saved while other weights were trained: {'; '.join(changed[:3])}{more}. Set layer.trainable "
            "as that run had it, or choose another folder and load the weights there."
        )


_words = {_TRAINED: "trainable", _FROZEN: "frozen"}


def slots_of_others(saved: Mapping[str, list], here: Mapping[str, list]) -> list[tuple[str, str]]:
    """Slots and masters that would get the value of another weight's, as far as names tell: theirs then and now.

    Keras names a slot by the path of its weight. Weights are compared by their places, since Keras numbers layers by
    process.

    Args:
        saved: What `variables.layout` returned then; of the same shapes.
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
