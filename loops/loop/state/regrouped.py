"""A run that goes on with its examples grouped otherwise: over replicas, micro-batches, or batches."""

from __future__ import annotations

import re
from collections.abc import Mapping

import tensorflow as tf

from loops.loop.state.change import Unlike
from loops.loop.state.identity import flat
from loops.loop.state.replicas import key_of
from loops.loop.state.state import RunState
from loops.support.errors import CheckpointError

_SIZE = re.compile(r"(?:shape=\(|TensorShape\(\[)(\d+)")


def regroup(path: str, saved: Mapping, state: RunState, changes: Mapping, done: int) -> tuple[Unlike, dict[str, str]]:
    """What changed groups of examples mean for what a checkpoint holds.

    Args:
        path: Of the checkpoint.
        saved: Its facts.
        state: That of this run.
        changes: What differs and is meant to, as sentences.
        done: The batches that this program has taken already.

    Returns:
        What is not restored as it was saved, and the sentences with what follows from the changes.
    """
    said, apart, restart = dict(changes), frozenset[str](), None
    if "replicas" in said:
        said["replicas"] += ", so that its bits are no longer those of the earlier machine"
    if "accumulate" in said:
        apart = frozenset(["window"])
        if dropped := _in_open_window(path, saved["variables"]):
            said["accumulate"] += f", so that the window that is open after micro-batch {dropped} is dropped"
    then, now = _batch_size(saved["identity"], saved["settings"]), _batch_size(state.identity, state.settings)
    if said.keys() & {"accumulate", "batches"} and then != now:
        restart = _batches_before(path, saved, (then, now), done)
        said["batches"] = f"batches had {then} examples and have {now}: from the beginning {restart} are passed over"
    return Unlike(apart, "replicas" in said, restart), said


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
