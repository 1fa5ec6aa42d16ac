"""A folder of checkpoints: lists, checks and describes them, and removes what a killed save left behind."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import re
import shutil
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from loops.loop.state import facts
from loops.loop.workers import Workers
from loops.support.errors import CheckpointError

NAME = "ckpt"
_FACTS = "facts/.ATTRIBUTES/py_state"


Found = tuple[int | None, dict[str, Any], dict[int, str]]
"""A step or None, the facts of its checkpoint, and the reasons why newer ones could not be read, by step."""


class Damaged(Exception):
    """A checkpoint that cannot be read, with the reason."""


def numbers(folder: pathlib.Path) -> list[int]:
    """The steps that have a checkpoint here, newest first, damaged or not."""
    found = (re.fullmatch(rf"{NAME}-(\d+)\.index", path.name) for path in folder.glob(f"{NAME}-*.index"))
    return sorted((int(match[1]) for match in found if match), reverse=True)


def prefix(folder: pathlib.Path, number: int) -> str:
    """The path of a checkpoint, as TensorFlow takes it."""
    return str(folder / f"{NAME}-{number}")


def read_facts(path: str, *, whole: bool = True) -> dict[str, Any]:
    """The JSON that was saved in a checkpoint, after reading the whole checkpoint, which verifies every checksum.

    Args:
        path: A path from `prefix`.
        whole: Whether to read the whole checkpoint, or only its JSON.

    Raises:
        Damaged: If anything in it cannot be read.
    """
    try:
        reader = tf.train.load_checkpoint(path)
        _check_sizes(path, reader)
        for key, dtype in reader.get_variable_to_dtype_map().items() if whole else ():
            # One at a time to save memory; the reader's own get_tensor refuses the variants of iterators.
            tf.raw_ops.RestoreV2(prefix=path, tensor_names=[key], shape_and_slices=[""], dtypes=[dtype])
        return facts.parse(reader.get_tensor(_FACTS))
    except Exception as error:  # TensorFlow raises RuntimeError, IndexError or OpError, by what is damaged.
        raise Damaged(" ".join(str(error).split())[:200]) from error


def _check_sizes(path: str, reader: Any) -> None:
    """Compares what an index says with the data: TensorFlow allocates what it says before it looks at the data."""
    place = pathlib.Path(path)
    there = sum(part.stat().st_size for part in place.parent.glob(f"{place.name}.data-*"))
    dtypes = reader.get_variable_to_dtype_map()
    sizes = {tf.string: 1, tf.variant: 0}
    shapes = reader.get_variable_to_shape_map()
    said = sum(math.prod(shape) * sizes.get(dtypes[key], dtypes[key].size) for key, shape in shapes.items())
    if said > there:
        raise ValueError(f"its index tells of {said} bytes, and its data has {there}")


def newest_whole(folder: pathlib.Path, limit: int | None = None) -> Found:
    """The newest checkpoint that can be read.

    Args:
        folder: A folder of checkpoints.
        limit: The newest step to look at, or None for all.

    Returns:
        Its step, or None; its facts; and by step the reasons why newer ones could not be read.
    """
    damaged: dict[int, str] = {}
    for number in numbers(folder):
        if limit is not None and number > limit:
            continue
        try:
            return number, read_facts(prefix(folder, number)), damaged
        except Damaged as error:
            damaged[number] = str(error)
    return None, {}, damaged


def newest_facts(folder: pathlib.Path) -> tuple[int | None, dict[str, Any]]:
    """The step and the facts of the newest checkpoint whose facts can be read; None if there is none.

    Unlike `newest_whole` it does not read the values, which takes long.
    """
    for number in numbers(folder):
        with contextlib.suppress(Damaged):
            return number, read_facts(prefix(folder, number), whole=False)
    return None, {}


class Copied(NamedTuple):
    """A value of a checkpoint that no step changes.

    Attributes:
        name: Its name in the file.
        slices: Which part of the name's value it is.
        value: An array in the memory of the copy, or a tensor.
        dtype: The value's own: the array may have another of the same size.
    """

    name: str
    slices: str
    value: np.ndarray | tf.Tensor
    dtype: tf.DType

    @property
    def tensor(self) -> tf.Tensor:
        """The value, in the same memory."""
        if isinstance(self.value, tf.Tensor):
            return self.value
        shared = tf.experimental.dlpack.from_dlpack(self.value.__dlpack__())
        return shared if shared.dtype == self.dtype else tf.bitcast(shared, self.dtype)


def write(folder: pathlib.Path, number: int, copied: Iterable[Copied]) -> None:
    """Writes a checkpoint as TensorFlow does: elsewhere, then its data and at last its index are moved into place.

    Raises:
        tf.errors.OpError: If it cannot be written.
    """
    path, parts = prefix(folder, number), list(copied)
    part = f"{path}_temp/part-00000-of-00001"
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=part,
            tensor_names=[one.name for one in parts],
            shape_and_slices=[one.slices for one in parts],
            tensors=[one.tensor for one in parts],
        )
        tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=[part], destination_prefix=path, delete_old_dirs=True)


def sweep(folder: pathlib.Path, keep: int, newest: int) -> None:
    """Removes what killed saves left behind, and makes TensorFlow's list agree with the files.

    A save that was killed before it removed the oldest checkpoint leaves one too many. A worker that was one save ahead
    of another when they were killed has a checkpoint that the run cannot resume from.

    Args:
        folder: A folder of checkpoints.
        keep: How many to keep.
        newest: The step that the run resumes from: later checkpoints are removed.
    """
    found = numbers(folder)
    left = [number for number in found if number <= newest][:keep]
    for number in set(found) - set(left):
        pathlib.Path(prefix(folder, number) + ".index").unlink()  # Makes its data a leftover.
    sweep_leftovers(folder)
    listed = [folder / f"{NAME}-{number}" for number in reversed(numbers(folder))]
    if not listed:
        (folder / "checkpoint").unlink(missing_ok=True)
        return
    # A CheckpointState in text form. TensorFlow's own function for it is deprecated, and warns at each call.
    lines = [f'model_checkpoint_path: "{listed[-1].name}"']
    lines += [f'all_model_checkpoint_paths: "{path.name}"' for path in listed]
    times = [path.with_name(path.name + ".index").stat().st_mtime for path in listed]
    lines += [f"all_model_checkpoint_timestamps: {time!r}" for time in times]
    temporary = folder / "checkpoint.tmp"
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(folder / "checkpoint")


def sweep_leftovers(folder: pathlib.Path) -> None:
    """Removes parts of checkpoints that were never finished."""
    present = numbers(folder)
    for path in folder.iterdir():
        if _is_leftover(path.name, present):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def copy(source: pathlib.Path, target: pathlib.Path, number: int) -> None:
    """Copies a checkpoint, then removes all others in the target: a kill at any moment leaves a complete one there.

    A checkpoint exists once its index does, which is moved into place last.

    Args:
        source: The folder to copy from.
        target: An existing folder, which then has only this checkpoint. If it already has it, nothing is copied.
        number: The checkpoint's step.

    Raises:
        OSError: If it cannot be copied.
    """
    if number not in numbers(target):
        files = sorted(source.glob(f"{NAME}-{number}.*"), key=lambda path: path.name.endswith(".index"))
        for path in files:
            shutil.copyfile(path, target / f"{path.name}.tempstate0")
        for path in files:
            (target / f"{path.name}.tempstate0").replace(target / path.name)
    for other in numbers(target):
        if other != number:
            pathlib.Path(prefix(target, other) + ".index").unlink()  # Makes its data a leftover.
    sweep_leftovers(target)


def set_aside(folder: pathlib.Path, number: int) -> None:
    """Renames a damaged checkpoint, so that it is ignored but can still be examined."""
    for path in folder.glob(f"{NAME}-{number}.*"):
        path.replace(path.with_name(f"damaged-{path.name}"))


def _is_leftover(name: str, present: list[int]) -> bool:
    if re.match(rf"{NAME}-\d+_temp|{NAME}-\d+\.index\.tempstate|checkpoint\.tmp|probe-|.*\.tempstate\d+$", name):
        return True
    data = re.match(rf"{NAME}-(\d+)\.data-", name)
    return data is not None and int(data[1]) not in present


def describe(directory: str | os.PathLike, subfolder: str = "") -> dict:
    """The newest readable checkpoint of a folder, and the steps of the others.

    Args:
        directory: A folder of checkpoints.
        subfolder: Searched if the folder itself has no checkpoints.

    Returns:
        `checkpoint`: its path; `step`; `others`: the steps of the other checkpoints, newest first; `damaged`: a reason
        for each newer checkpoint that cannot be read, by step; `bytes` on disk; `counters`: data, attempted, applied,
        skipped; `loss_scaler`: the strategy's state, if there is one; `identity`: that of the run that saved it;
        `changes`: the steps from which it went on with other settings;
        `data`: `batches` taken, the `problem` if the position could not be saved, and all `caveats`; `variables`: for
        each group `count` and `values`; `held`: the step's tables and iterators; `random`: the saved state of each kind
        of generator; `evaluations`: the newest `results` of each `Evaluate` and their `step`, by its name; `actions`:
        those with a state; `versions`.

    Raises:
        CheckpointError: If there is no checkpoint, or none that can be read.
    """
    place = pathlib.Path(directory)
    if not numbers(place) and numbers(place / subfolder):
        place = place / subfolder
    number, facts, damaged = newest_whole(place)
    if number is None:
        reasons = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
        raise CheckpointError(
            f"{place}: none of its checkpoints can be read ({reasons})."
            if reasons
            else f"{place}: no checkpoint. Name the folder that was given to hs.Checkpoint, or a run's --out."
        )
    return {
        "checkpoint": prefix(place, number),
        "step": number,
        "others": [other for other in numbers(place) if other != number],
        "damaged": {str(step): why for step, why in damaged.items()},
        "bytes": sum(path.stat().st_size for path in place.glob(f"{NAME}-{number}.*")),
        "counters": facts["counters"],
        "loss_scaler": facts.get("loss_scaler"),
        "identity": facts["identity"],
        "changes": facts.get("changes", []),
        "data": facts["data"],
        "variables": {
            group: {"count": len(variables), "values": sum(_size(shape) for _, _, shape in variables)}
            for group, variables in facts["variables"].items()
        },
        "held": facts.get("held", []),
        "random": {"seed_generators": _seed_generators(facts), **_shortened(facts["random"])},
        "evaluations": _evaluations(facts),
        "actions": sorted(facts["actions"]),
        "versions": facts["versions"],
    }


def _size(shape: list[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _evaluations(facts: dict) -> dict[str, dict]:
    """The states of actions with results, such as an `Evaluate`."""
    return {
        (facts["action_keys"].get(label) or [label])[-1]: state
        for label, state in facts["actions"].items()
        if isinstance(state, dict) and isinstance(state.get("results"), dict) and state.get("step")
    }


def _seed_generators(facts: dict) -> int:
    names = [name for variables in facts["variables"].values() for name, _, _ in variables]
    return sum("seed_generator_state" in name for name in names)


def _shortened(random: dict) -> dict:
    """Short states in full; for long ones the generator's name and position."""
    short = {"python": {"generator": "MT19937", "position": random["python"][1][-1]}}
    short["numpy"] = {"generator": random["numpy"][0], "position": random["numpy"][2]}
    return {
        "tf_generator": random["tf_generator"],
        "keras_generator": random["keras_generator"],
        "op_seeds": random["op_seeds"] is not None,
        **short,
    }


def of_worker(directory: pathlib.Path, workers: Workers) -> pathlib.Path:
    """The folder of this worker's checkpoints: the directory itself for worker 0, one inside of it for others."""
    return directory / f"worker-{workers.index}" if workers.index else directory


def newest_common(where: pathlib.Path, workers: Workers, found: Found) -> Found:
    """As `newest_whole`, among the steps that all workers have. Every worker must call this.

    Workers save at the same steps and synchronize between two saves. A kill thus finds a worker at most one save ahead
    of another, and with two checkpoints each there is a common one.

    Args:
        where: This worker's folder.
        workers: All workers.
        found: What `newest_whole` returned for this folder.

    Raises:
        CheckpointError: On every worker, if workers have checkpoints, but none of a common step.
    """
    number, facts, damaged = found
    while len(newest := {row[0] for row in workers.gather([number or 0])}) > 1:
        number, facts, older = newest_whole(where, min(newest))
        damaged = {**damaged, **older}
    if workers.count > 1 and number is None:
        counts = [row[0] for row in workers.gather([len(numbers(where))])]
        # A kill during the very first save leaves one checkpoint with some and none with others.
        if max(counts) > 1:
            has = "; ".join(f"worker {worker} has {count}" for worker, count in enumerate(counts))
            raise CheckpointError(
                f"{where}: there is no step for which every worker has a whole checkpoint ({has}). Give each worker "
                "the folder that it had, or remove the checkpoints of all to start from the beginning."
            )
    return number, facts, damaged
