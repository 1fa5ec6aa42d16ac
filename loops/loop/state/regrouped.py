"""A run that goes on with other settings, or with its examples grouped otherwise: over replicas, windows, or batches.

On another number of replicas:

    ON_READ with SUM aggregation  added up for the first replica, zeros for the others: the sums of an open window
    other floats that differ      averaged for all: BatchNorm's statistics
    other values that differ      the first replica's for all

Others are alike on all replicas, and kept: weights, masters, slots, the loss scale, counters, seeds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from loops.loop.state.compared import Changes, Unlike, differences, flat, is_another_strategy, why_fixed
from loops.loop.state.variables import Groups, layout
from loops.support.errors import CheckpointError

if TYPE_CHECKING:
    from loops.loop.state.state import RunState

_REPLICA = re.compile(r"(.*)/replica_(\d+)")


def by_variable(entries: Sequence) -> list[list[int]]:
    """The places of each variable's components in a group of a layout, that of the first replica first.

    Args:
        entries: Name, dtype and shape of each component. TensorFlow names them `v`, `v/replica_1`, ...
    """
    found: list[list[int]] = []
    by_name: dict[str, list[list[int]]] = {}
    for place, (name, *_) in enumerate(entries):
        part = _REPLICA.fullmatch(name)
        # Several variables may have one name. A step's components may be listed replica by replica.
        lacking = (one for one in by_name.get(part[1], []) if len(one) == int(part[2])) if part else iter(())
        if (own := next(lacking, None)) is not None:
            own.append(place)
        else:
            found.append([place])
            by_name.setdefault(name, []).append(found[-1])
    return found


def first_of_each(groups: Mapping[str, list], values: Mapping[str, Sequence]) -> dict[str, list]:
    """For each group of a layout the values of first replicas; `values` has one for each entry."""
    return {
        name: [values[name][places[0]] for places in by_variable(entries)]
        for name, entries in groups.items()
        if name in values
    }


def restore(path: str, saved: Mapping[str, list], groups: Groups) -> None:
    """Assigns the values of a checkpoint to other numbers of components.

    Args:
        path: Of the checkpoint.
        saved: Its layout.
        groups: Those to assign. But for their components they are as in the checkpoint.
    """
    reader = tf.train.load_checkpoint(path)
    for name, here in layout(groups).items():
        for then, now in zip(by_variable(saved[name]), by_variable(here), strict=True):
            values = [reader.get_tensor(key_of(name, place)) for place in then]
            components = [groups[name][place] for place in now]
            for component, value in zip(components, _shared(values, components), strict=True):
                component.assign(value)


def key_of(group: str, place: int) -> str:
    """The name of a variable in a checkpoint."""
    return f"{group}/{place}/.ATTRIBUTES/VARIABLE_VALUE"


def _shared(values: Sequence[np.ndarray], components: Sequence[tf.Variable]) -> Iterable:
    """The value of each component."""
    variable, first = components[0], values[0]
    dtype, on_read = variable.dtype, variable.synchronization == tf.VariableSynchronization.ON_READ
    if on_read and variable.aggregation == tf.VariableAggregation.SUM:
        total = tf.add_n([tf.constant(value, dtype) for value in values])
        return [total, *(tf.zeros_like(total) for _ in components[1:])]
    if not dtype.is_floating or all(value.tobytes() == first.tobytes() for value in values):
        return [first] * len(components)
    mean = tf.reduce_mean([tf.cast(tf.constant(value, dtype), tf.float64) for value in values], axis=0)
    return [tf.cast(mean, dtype)] * len(components)


_SIZE = re.compile(r"(?:shape=\(|TensorShape\(\[)(\d+)")


def how_to_go_on(
    path: str, saved: Mapping, state: RunState, changes: Mapping[str, str], meant: Changes, done: int
) -> tuple[Unlike, dict[str, str], list[str]]:
    """What follows for a run from the differences between a checkpoint and this program.

    Args:
        path: Of the checkpoint.
        saved: Its facts.
        state: That of this run.
        changes: What of the run's identity is meant to differ, as `check_identity` returned it.
        meant: What may differ.
        done: The batches that this program has taken already.

    Returns:
        What is not restored as it was saved; all that is meant to differ, and the other settings that do, as sentences.

    Raises:
        CheckpointError: After a change by which saved variables would mean something else, though they have the same
            shapes.
    """
    # An optimizer is described twice: as a part of the step, and as a setting of any program.
    known = {fact.split(".")[-1] for fact in changes}
    said, apart, restart = dict(changes), frozenset[str](), None
    if "replicas" in said:
        said["replicas"] += ", so that its bits are no longer those of the earlier machine"
    if "accumulate" in said:
        apart = frozenset(["window"])
        if dropped := _in_open_window(path, saved["variables"]):
            said["accumulate"] += f", so that the window that is open after micro-batch {dropped} is dropped"
    sizes = _batch_size(saved["identity"], saved["settings"]), _batch_size(state.identity, state.settings)
    if said.keys() & {"accumulate", "batches"} and sizes[0] != sizes[1]:
        restart = _batches_before(path, saved, sizes, done)
        had = f"batches had {sizes[0]} examples and have {sizes[1]}"
        said["batches"] = f"{had}: from the beginning {restart} are passed over"
    unlike = Unlike(apart, "replicas" in said, restart)
    different = {
        fact: sentence
        for fact, sentence in differences(saved["settings"], state.settings).items()
        if fact.split(".")[-1] not in known and not unlike.explains(fact)
    }
    said |= {fact: sentence for fact, sentence in different.items() if meant.are(fact)}
    here = {"identity": state.identity, "settings": state.settings}
    then, now = (flat({**one["identity"], **one["settings"]}) for one in (saved, here))
    for fact in said:
        if why := why_fixed(fact, then, now):
            raise CheckpointError(f"{path}: {why}")
    if "strategy" in said and is_another_strategy(then.get("strategy"), now.get("strategy")):
        unlike = unlike._replace(apart=unlike.apart | {"loss_scaler"})
    return unlike, said, [sentence for fact, sentence in different.items() if fact not in said]


def _in_open_window(path: str, layout: Mapping[str, list]) -> int:
    """How many micro-batches the open window of a checkpoint has."""
    names = [name for name, *_ in layout.get("window", ())]
    return int(tf.train.load_variable(path, key_of("window", names.index("micro_batches")))) if names else 0


def _batch_size(identity: Mapping, settings: Mapping) -> int | None:
    """The examples of a batch, as far as the facts of a run tell."""
    if known := _SIZE.search(identity["batches"]):
        return int(known[1])
    sizes = [size for name, size in flat(settings).items() if name.endswith(".batch_size")]
    return sizes[-1] if sizes else None


def _batches_before(path: str, saved: Mapping, sizes: tuple[int | None, int | None], done: int) -> int:
    """How many batches of the size here hold the examples that were taken."""
    (then, now), taken = sizes, saved["data"]["batches"]
    if then is None or now is None:
        why, what = "is not known in both runs", "Use Dataset.batch with drop_remainder=True in both"
    elif taken * then % now:
        why, what = f"was {then} and is {now}, which do not meet after {taken} batches", "Use a size that divides it"
    elif "Rewind" in saved["actions"]:
        why, what = f"was {then} and is {now}, and Rewind counts the batches that it leaves out", "Keep the size"
    elif done:
        why, what = f"was {then} and is {now}, and the data can only begin again in a new process", "Resume in one"
    else:
        return taken * then // now
    raise CheckpointError(
        f"{path}: the place in the data cannot be found, since the number of examples in a batch {why}. {what}, or go "
        "on with the batches and the accumulate of that run."
    )
