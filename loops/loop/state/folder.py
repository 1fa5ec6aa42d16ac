"""A folder of checkpoints: lists them, checks them, and removes what a killed save left behind."""

from __future__ import annotations

import contextlib
import math
import pathlib
import re
import shutil
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from loops.loop.state import facts
from loops.loop.state.state import Copied

NAME = "ckpt"
_FACTS = "facts/.ATTRIBUTES/py_state"


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


def newest_whole(folder: pathlib.Path, limit: int | None = None) -> tuple[int | None, dict[str, Any], dict[int, str]]:
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
