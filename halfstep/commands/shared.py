"""What several commands share: exit statuses, which docs/commands.md explains, arguments, and names in their help.

Help is shown before TensorFlow is imported. So most names repeat those of `loops` and `scaler`, and
tests/loops/command/test_cli_help.py compares them.
"""

from __future__ import annotations

import argparse
import contextlib
import math

from halfstep.front_door import names_of

IMAGE_TASKS = ("digits", "mnist")
"""The tasks that are an `ImageTask`: a study accepts only these."""
TASKS = (*IMAGE_TASKS, "text")
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16")
STRATEGIES = ("dynamic", "headroom", "histogram", "delayed_amax", "log_normal", "smooth")
"""The strategies that need no argument."""
TUNED = ("static", "dynamic", "headroom", "log_normal", "histogram", "delayed_amax", "smooth")
"""The strategies whose parameters `halfstep lab tune` searches."""
PRESETS: tuple[str, ...] = ()
with contextlib.suppress(ImportError):  # The command names a package that is hidden when it runs.
    PRESETS = tuple(name for name in names_of("scaler.presets") if not name.endswith("_stuck"))
"""The strategies in `scaler.presets`."""
SETUPS = (
    "float32",
    "mixed-none",
    "mixed-dynamic",
    "float16-none",
    "float16-static",
    "float16-dynamic",
    "small-float32",
    "small-mixed-none",
    "small-mixed-dynamic",
)
"""The set-ups that `halfstep lab study` compares."""
EMULATED = ("emulated-float8", "emulated-mxfp8", "emulated-mxfp6", "emulated-mxfp4", "emulated-nvfp4")
"""Further ones, which run if they are named."""
UNIT_SCALED = ("unit-float32", "unit-mixed-none")
"""Those of a unit-scaled model, likewise."""
FORMS = (
    "none, static:SCALE (static:1024), or a name, with options as in dynamic:growth_interval=200,initial_scale=2**16: "
    f"{', '.join(STRATEGIES)}, or one of hs.presets: {', '.join(PRESETS)}; around any of them "
    "warmup:STEPS+, bounded:MIN,MAX+ or rising_floor:STEP=FLOOR,STEP=FLOOR+ (warmup:100+dynamic); around them all "
    "spike_guard+ (spike_guard:factor=20+dynamic); one after the other with +then:STEP+ (static:1024+then:500+dynamic)"
)
"""The syntax of `loops.run.strategy_text.parse_strategy`, in words."""


EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_SOME_FAILED = 3
"""Some runs of a study failed, and others finished."""
EXIT_FOUND = 4
"""A problem was found: lint reports one, or probes change the run."""
EXIT_WORKER_LOST = 75
"""Another worker was lost: EX_TEMPFAIL ("try again") of sysexits.h."""
EXIT_INTERRUPTED = 130
"""After SIGINT: 128 + 2, as in shells."""
EXIT_CLOSED_PIPE = 141
"""The reader of the output is gone: 128 + 13, as for a process that SIGPIPE ends."""
EXIT_TERMINATED = 143
"""After SIGTERM: 128 + 15."""


def count(text: str) -> int:
    """An integer of at least 1."""
    return _integer(text, 1, math.inf, "of at least 1")


def seed(text: str) -> int:
    """An integer in [0, 2^32)."""
    return _integer(text, 0, 2**32, "in [0, 2^32)")


def _integer(text: str, least: int, end: float, which: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value < end:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer {which}")
    return value


def add_run(parser: argparse.ArgumentParser) -> None:
    """Declares RUN and --build, which say how to rebuild a run."""
    parser.add_argument("folder", metavar="RUN", help="the --out of halfstep train, or a program's folder")
    parser.add_argument(
        "--build",
        metavar="MODULE:FUNCTION",
        help="for a run of your own program: a function, importable from the current folder, that takes the run's "
        "folder and returns the hs.Loop with its Checkpoint",
    )
