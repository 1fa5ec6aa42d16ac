"""A folder of checkpoints: which are there, which are whole, and what a killed save left behind."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from typing import Any

import tensorflow as tf

NAME = "ckpt"
_FACTS = "facts/.ATTRIBUTES/py_state"
_FORMAT = 1


class Damaged(Exception):
    """A checkpoint that cannot be read, with the reason."""


def numbers(folder: pathlib.Path) -> list[int]:
    """The steps that have a checkpoint here, newest first, whole or not."""
    found = (re.fullmatch(rf"{NAME}-(\d+)\.index", path.name) for path in folder.glob(f"{NAME}-*.index"))
    return sorted((int(match[1]) for match in found if match), reverse=True)


def prefix(folder: pathlib.Path, number: int) -> str:
    """The path that TensorFlow knows a checkpoint by."""
    return str(folder / f"{NAME}-{number}")


def read_facts(path: str, *, whole: bool = True) -> dict[str, Any]:
    """What a checkpoint says of itself, after reading all of it, which proves every checksum.

    Args:
        path: As from `prefix`.
        whole: Whether to read all of it, or the facts alone.

    Raises:
        Damaged: If anything in it cannot be read.
    """
    try:
        reader = tf.train.load_checkpoint(path)
        for key, dtype in reader.get_variable_to_dtype_map().items() if whole else ():
            # One at a time, for the sake of memory; the reader itself refuses the variants of iterators.
            tf.raw_ops.RestoreV2(prefix=path, tensor_names=[key], shape_and_slices=[""], dtypes=[dtype])
        facts = json.loads(reader.get_tensor(_FACTS))
    except Exception as error:  # TensorFlow raises RuntimeError, IndexError or OpError, by what is damaged.
        raise Damaged(" ".join(str(error).split())[:200]) from error
    if facts.get("format") != _FORMAT:
        raise Damaged(f"its format is {facts.get('format')!r}, and this version reads {_FORMAT}")
    return facts


def newest_whole(folder: pathlib.Path, limit: int | None = None) -> tuple[int | None, dict[str, Any], dict[int, str]]:
    """The newest checkpoint that can be read.

    Args:
        folder: Where they are.
        limit: The newest step to look at, or None for all.

    Returns:
        Its number, or None; its facts; and the reasons why newer ones could not be read.
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


def sweep(folder: pathlib.Path, keep: int, newest: int) -> None:
    """Removes what killed saves left behind, and makes TensorFlow's list agree with the files.

    A save that was killed before it removed the oldest checkpoint leaves one more than are to be kept. A worker that
    was a save ahead of another when they were killed has a checkpoint that nobody goes on from.

    Args:
        folder: Where they are.
        keep: How many to leave.
        newest: The step that the run goes on from: checkpoints of later ones are removed.
    """
    found = numbers(folder)
    left = [number for number in found if number <= newest][:keep]
    for number in set(found) - set(left):
        pathlib.Path(prefix(folder, number) + ".index").unlink()  # Its data is a leftover then.
    sweep_leftovers(folder)
    listed = [folder / f"{NAME}-{number}" for number in reversed(numbers(folder))]
    if not listed:
        (folder / "checkpoint").unlink(missing_ok=True)
        return
    # A CheckpointState in text form; TensorFlow's own function to write it is deprecated, and says so at each call.
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
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def copy(source: pathlib.Path, target: pathlib.Path, number: int) -> None:
    """Copies a checkpoint, then removes others: a kill at any moment leaves a whole one, if there was one before.

    A checkpoint is there when its index is, which is put in place last.

    Args:
        source: The folder that has it.
        target: The folder that is to have it alone, and exists. If it has it already, nothing is copied.
        number: Which.

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
            pathlib.Path(prefix(target, other) + ".index").unlink()  # Its data is a leftover then.
    sweep_leftovers(target)


def set_aside(folder: pathlib.Path, number: int) -> None:
    """Renames a damaged checkpoint, so that it is found no more and can still be looked at."""
    for path in folder.glob(f"{NAME}-{number}.*"):
        path.replace(path.with_name(f"damaged-{path.name}"))


def _is_leftover(name: str, present: list[int]) -> bool:
    if re.match(rf"{NAME}-\d+_temp|{NAME}-\d+\.index\.tempstate|checkpoint\.tmp|probe-|.*\.tempstate\d+$", name):
        return True
    data = re.match(rf"{NAME}-(\d+)\.data-", name)
    return data is not None and int(data[1]) not in present
