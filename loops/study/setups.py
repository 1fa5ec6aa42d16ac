"""The set-ups that a study compares, how each is drawn, and what the study's `summary.json` and steps say of them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence

import numpy as np

from loops.record.steps import Steps
from loops.run.strategy_text import parse_strategy
from loops.run.train import RunOptions
from loops.support.errors import check
from loops.support.palette import BLACK, BLUE, DASHES, GREEN, ORANGE, PINK, RED, Mark, mark

SMALL = 2.0**-20
"""The factor of the small-loss set-ups, like a loss term with a weight of one in a million."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """One way to train.

    Attributes:
        name: As on the command line and in folder names.
        title: For people.
        policy: Keras dtype policy.
        strategy: As `loops.run.strategy_text.parse_strategy` takes it.
        masters: Whether 16-bit variables have float32 masters.
        loss_factor: A constant the loss is multiplied by.
        emulated: The format of the layers' products, as `scaler.formats.emulated` takes it.
        unit_scaled: Whether the model and its loss are those of `scaler.formats.unit_scaled`.
        learning_rate: Adam's.
    """

    name: str
    title: str
    policy: str
    strategy: str
    masters: bool = True
    loss_factor: float = 1.0
    emulated: str | None = None
    unit_scaled: bool = False
    learning_rate: float = RunOptions.learning_rate

    def options(self, steps: int, seed: int) -> RunOptions:
        """The options of one of its runs."""
        own = dataclasses.asdict(self)
        del own["name"], own["title"]
        return RunOptions(steps=steps, seed=seed, **own)


# A short run would never grow its scale with an interval of 2000 steps.
_DYNAMIC = "dynamic:growth_interval=50"

SETUPS = (
    Setup("float32", "float32", "float32", "none"),
    Setup("mixed-none", "mixed float16, no scaling", "mixed_float16", "none"),
    Setup("mixed-dynamic", "mixed float16, dynamic scale", "mixed_float16", _DYNAMIC),
    Setup("float16-none", "pure float16, no masters, no scaling", "float16", "none", masters=False),
    Setup("float16-static", "float16 with masters, static scale 1024", "float16", "static:1024"),
    Setup("float16-dynamic", "float16 with masters, dynamic scale", "float16", _DYNAMIC),
    Setup("small-float32", "small loss: float32", "float32", "none", loss_factor=SMALL),
    Setup("small-mixed-none", "small loss: mixed float16, no scaling", "mixed_float16", "none", loss_factor=SMALL),
    Setup(
        "small-mixed-dynamic", "small loss: mixed float16, dynamic scale", "mixed_float16", _DYNAMIC, loss_factor=SMALL
    ),
)
"""The six set-ups of the study, and three on a loss multiplied by `SMALL`, where float16 without scaling stalls."""


EMULATED = (
    Setup("emulated-float8", "E4M3, gradients in E5M2, delayed scaling", "float32", "none", emulated="float8_e4m3fn"),
    Setup("emulated-mxfp8", "MXFP8, E4M3 in blocks of 32", "float32", "none", emulated="mxfp8_e4m3"),
    Setup("emulated-mxfp6", "MXFP6, E3M2 in blocks of 32", "float32", "none", emulated="mxfp6_e3m2"),
    Setup("emulated-mxfp4", "MXFP4, E2M1 in blocks of 32", "float32", "none", emulated="mxfp4"),
    Setup("emulated-nvfp4", "NVFP4, E2M1 in blocks of 16", "float32", "none", emulated="nvfp4"),
)
"""Set-ups in emulated formats, which run if they are named: they take several times as long."""

# Weights are about ten times as large as others, and Adam's steps do not depend on the size of gradients.
_UNIT_RATE = 10 * RunOptions.learning_rate

UNIT_SCALED = (
    Setup("unit-float32", "unit-scaled, float32", "float32", "none", unit_scaled=True, learning_rate=_UNIT_RATE),
    Setup(
        "unit-mixed-none",
        "unit-scaled, mixed float16, no scaling",
        "mixed_float16",
        "none",
        unit_scaled=True,
        learning_rate=_UNIT_RATE,
    ),
)
"""Set-ups of a unit-scaled model, which run if they are named: their weights begin with other values."""

FURTHER = (*EMULATED, *UNIT_SCALED)
"""The set-ups that run if they are named."""


def choose_setups(names: Sequence[str]) -> list[Setup]:
    """The set-ups with these names, in the study's order; all of `SETUPS` if there are no names.

    Raises:
        scaler.InvalidArgument: For an unknown name.
    """
    known = {setup.name: setup for setup in (*SETUPS, *FURTHER)}
    for name in names:
        check(f"set-up {name!r}", name in known, f"one of {', '.join(known)}")
    return [setup for setup in known.values() if setup.name in names] if names else list(SETUPS)


def strategy_setups(texts: Sequence[str]) -> list[Setup]:
    """A set-up for each strategy, in mixed float16, after float32 as the reference.

    Args:
        texts: Strategies in the syntax of `parse_strategy`. Duplicates are dropped.

    Raises:
        scaler.InvalidArgument: For a text that is not a strategy.
    """
    setups = {SETUPS[0].name: SETUPS[0]}
    for text in dict.fromkeys(texts):
        parse_strategy(text)
        # The name is also a folder's name.
        plain = re.sub(r"[^\w.=,+-]+", "-", text, flags=re.ASCII)[:100]
        name, number = plain, 2
        while name in setups:
            name, number = f"{plain}-{number}", number + 1
        setups[name] = Setup(name, text, "mixed_float16", text)
    return list(setups.values())


_SETUPS = {
    "float32": (BLACK, "o"),
    "mixed-none": (ORANGE, "s"),
    "mixed-dynamic": (BLUE, "^"),
    "float16-none": (RED, "D"),
    "float16-static": (PINK, "v"),
    "float16-dynamic": (GREEN, "X"),
}


def marks(summary: Mapping) -> dict[str, Mark]:
    """The mark of each set-up of a study, by name. A small-loss set-up looks like its twin, dashed."""
    found: dict[str, Mark] = {}
    others = itertools.count()
    for name in (row["name"] for row in summary["setups"]):
        tint, marker = _SETUPS.get(name.removeprefix("small-"), (None, ""))
        if tint:
            found[name] = Mark(tint, DASHES[1] if name.startswith("small-") else (), marker)
        else:
            found[name] = mark(next(others))
    return found


StepsOf = Mapping[str, Steps]
"""The log of each run by the run's `folder`; of fewer steps than the study's if a run failed."""


def runs_of(summary: Mapping, row: Mapping) -> list[Mapping]:
    """The runs of a row of `summary["setups"]`."""
    return [run for run in summary["runs"] if run["setup"] == row["name"]]


def options_of(summary: Mapping, row: Mapping) -> Mapping:
    """The options that the runs of a row share, such as `policy` and `strategy`, from its first run."""
    return runs_of(summary, row)[0]


def failed(runs: Sequence[Mapping]) -> list[Mapping]:
    """The runs that ended with an error."""
    return [run for run in runs if "error" in run]


def failure(run: Mapping) -> str:
    """Which run failed, where and why, in one line."""
    error = run["error"]
    return f"{run['setup']} seed {run['seed']} failed {place(run)}: {error['type']}: {error['message']}"


def place(run: Mapping) -> str:
    """Where a run failed: "at step 150"."""
    step = run["error"]["step"]
    return f"at step {step}" if step else "before its first step"


def split_rows(summary: Mapping) -> tuple[list[Mapping], list[Mapping]]:
    """The rows of `summary["setups"]` that train on the plain loss, and those on a loss times a constant."""
    plain = [row for row in summary["setups"] if options_of(summary, row)["loss_factor"] == 1]
    return plain, [row for row in summary["setups"] if row not in plain]


def comparable(summary: Mapping, row: Mapping, other: Mapping) -> bool:
    """Whether two rows train on the same loss."""
    return options_of(summary, row)["loss_factor"] == options_of(summary, other)["loss_factor"]


def losses(summary: Mapping, steps: StepsOf, row: Mapping) -> np.ndarray:
    """The losses of a set-up without its constant factor, float [runs, steps]; NaN for missing or non-finite ones.

    The runs are those that finished, or all if none did.
    """
    runs = [run for run in runs_of(summary, row) if "error" not in run] or runs_of(summary, row)
    table = np.full((len(runs), summary["steps"]), np.nan)
    for values, run in zip(table, runs, strict=True):
        own = steps[run["folder"]]
        values[own.step - 1] = own.column("loss") / run["loss_factor"]
    return table


def scale_moves(summary: Mapping, steps: StepsOf, row: Mapping) -> bool:
    """Whether a run of the row had more than one loss scale, or skipped a step."""
    runs = [steps[run["folder"]] for run in runs_of(summary, row)]
    return any(len(np.unique(run.column("loss_scale"))) > 1 or run.skipped.any() for run in runs)


def constant_scale(summary: Mapping, steps: StepsOf, row: Mapping) -> float | None:
    """The loss scale of a row whose scale never moves; None for others, and before the first step."""
    known = {scale for run in runs_of(summary, row) for scale in steps[run["folder"]].column("loss_scale").tolist()}
    return known.pop() if len(known) == 1 and not scale_moves(summary, steps, row) else None
