"""A folder of checkpoints: lists, checks and describes them, and removes what a killed save left behind.

The facts of a checkpoint are JSON that says what run it is of. A file can hold anything, so their form is checked.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import re
import shutil
from typing import Any, NamedTuple

import tensorflow as tf

from loops.loop.workers import Workers
from loops.support.errors import CheckpointError
from loops.support.json_values import read_object
from loops.support.text import one_line

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
        return parse(reader.get_tensor(_FACTS))
    except Exception as error:  # TensorFlow raises RuntimeError, IndexError or OpError, by what is damaged.
        raise Damaged(one_line(error)) from error


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
    names = [name for variables in facts["variables"].values() for name, _, _ in variables]
    seed_generators = sum("seed_generator_state" in name for name in names)
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
            group: {"count": len(variables), "values": sum(math.prod(shape) for _, _, shape in variables)}
            for group, variables in facts["variables"].items()
        },
        "held": facts.get("held", []),
        "random": {"seed_generators": seed_generators, **_shortened(facts["random"])},
        "evaluations": _evaluations(facts),
        "actions": sorted(facts["actions"]),
        "versions": facts["versions"],
    }


def _evaluations(facts: dict) -> dict[str, dict]:
    """The states of actions with results, such as an `Evaluate`."""
    return {
        (facts["action_keys"].get(label) or [label])[-1]: state
        for label, state in facts["actions"].items()
        if isinstance(state, dict) and isinstance(state.get("results"), dict) and state.get("step")
    }


def _shortened(random: dict) -> dict:
    """Short states in full; for long ones the generator's name and position."""
    return {
        "tf_generator": random["tf_generator"],
        "keras_generator": random["keras_generator"],
        "op_seeds": random["op_seeds"] is not None,
        "python": {"generator": "MT19937", "position": random["python"][1][-1]},
        "numpy": {"generator": random["numpy"][0], "position": random["numpy"][2]},
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


FORMAT = 3
"""The format of a checkpoint that is saved."""
READ = (3,)
"""The formats that are read: those of every release."""
_MISSING = object()


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_shape(value: Any) -> bool:
    """Whether it is the sides of an array, None where they differ, or None if their number does."""
    return value is None or (isinstance(value, list) and all(side is None or _is_count(side) for side in value))


def _is_variable(entry: Any) -> bool:
    """Whether it is a name, a dtype and a shape."""
    return isinstance(entry, list) and [type(part) for part in entry] == [str, str, list]


def _are_shapes(value: Any) -> bool:
    """Whether these are the shapes of batches, each with as many arrays."""
    if not _fits(value, {"seen": [[_is_shape]], "common": _is_anything}):
        return False
    common = [] if value["common"] is None else [value["common"]]
    return _fits(common, [[_is_shape]]) and len(set(map(len, [*value["seen"], *common]))) <= 1


def _is_anything(value: Any) -> bool:
    return value is not _MISSING


class _Optional(NamedTuple):
    """A part that may be missing: a step may have no scaler, nothing may have been changed, a run may not be over."""

    form: Any


_SOURCE = {"name": str, "length": (int, type(None)), "state": _is_anything, "shapes": _are_shapes}
_FORM: dict[str, Any] = {
    "identity": dict,
    "versions": dict,
    "counters": {name: _is_count for name in ("data", "attempted", "applied", "skipped")},
    "data": {
        "batches": _is_count,
        "problem": (str, type(None)),
        "caveats": [str],
        "source": _Optional(_SOURCE),
    },
    "variables": {...: [_is_variable]},
    "actions": dict,
    "random": dict,
    "settings": dict,
    "trainable": {...: str},
    "held": list,
    "action_keys": {...: [str]},
    "loss_scaler": _Optional(dict),
    "changes": _Optional(list),
    "complete": _Optional(bool),
}
"""The form of each part: a type or several, a test, a list of one form, an object of names; `...` is any name."""


def parse(text: str | bytes) -> dict[str, Any]:
    """The facts in a text.

    Raises:
        ValueError: If it has another form, or is of another version.
    """
    facts = read_object(text)
    if facts.get("format") not in READ:
        said = ", ".join(map(str, READ))
        raise ValueError(f"its format is {repr(facts.get('format'))[:40]}, and this version reads {said}")
    for name, form in _FORM.items():
        if not _fits(facts.get(name, _MISSING), form):
            raise ValueError(f"its {name} {'is not that' if name == 'data' else 'are not those'} of a run")
    return facts


def _fits(value: Any, form: Any) -> bool:
    if isinstance(form, _Optional):
        return value is _MISSING or _fits(value, form.form)
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(part, form[0]) for part in value)
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return False
        names = dict.fromkeys(value, form[...]) if ... in form else form
        return all(_fits(value.get(name, _MISSING), one) for name, one in names.items())
    if isinstance(form, (type, tuple)):
        return type(value) in (form if isinstance(form, tuple) else (form,))
    return bool(form(value))
