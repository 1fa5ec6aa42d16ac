"""The runs, versions and machine behind a report, and the commands that make it again."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from loops.record.run import Recorded
from loops.run.train import POLICIES

_NAMES = {
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "python": "Python",
    "numpy": "NumPy",
    "devices": "devices",
    "intra_op_threads": "threads within an operation",
    "inter_op_threads": "threads between operations",
    "op_determinism": "deterministic operations",
    "jit_compile": "XLA",
}


def made(runs: Sequence[Recorded], arguments: Sequence[str]) -> tuple[list[tuple[str, str]], str]:
    """The versions and machine of each run and of this report, and the commands that make it again.

    Args:
        runs: The runs in the report.
        arguments: The arguments of `halfstep` that make the report again.
    """
    facts = list({run.name: _of_run(run) for run in runs}.items())
    this = (
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} on {platform.machine()}, {os.cpu_count()} CPUs"
    )
    trained = [command for command in map(training_command, runs) if command]
    return [*facts, ("this report", this)], "\n".join([*trained, shlex.join(["halfstep", *arguments])])


def training_command(run: Recorded) -> str:
    """The command that trains a run of `halfstep train` again; "" for any other run."""
    facts = run.facts
    wanted = {"task": str, "policy": str, "strategy": str, "seed": int}
    if any(not isinstance(facts.get(name), kind) for name, kind in wanted.items()) or facts["policy"] not in POLICIES:
        return ""
    options = {name: facts[name] for name in ("policy", "strategy", "seed")}
    options["steps"], options["out"] = facts.get("steps", int(run.step[-1])), run.place
    words = ["halfstep", "train", facts["task"]]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    return shlex.join(words)


def _of_run(run: Recorded) -> str:
    known = [f"{said} {_spelled(run.versions[name])}" for name, said in _NAMES.items() if name in run.versions]
    return ", ".join(known) or "does not record its versions: halfstep train and loops.Checkpoint do"


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " and ".join(map(str, value))
    return ", ".join(f"{key} {one}" for key, one in value.items()) if isinstance(value, Mapping) else str(value)
