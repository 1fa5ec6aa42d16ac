"""What a plain step weighs: operations of its graph, what XLA makes of it, its time, and the code that its trace runs.

    python benchmarks/weight_of_step.py [--json] [--quick]

The README's five-line step with three Dense layers and Adam, in mixed_float16, on one device: so small that most of its
time is what surrounds the products. `tests/scaler/test_weight_of_step.py` holds the counts as limits.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable

import models
import paired
import rich.console
import rich.table
import steps
import tensorflow as tf

import scaler

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "scaler"))
import weight_cases

SECONDS = 10.0
PLAIN = "no scaler"
HOME = pathlib.Path(scaler.__file__).parent


def of_keras(make: Callable) -> Callable:
    """A maker of a step that `steps` writes, for the model and the batch of the others."""
    x, y = map(tf.constant, weight_cases.BATCH)
    return lambda: make(models.Problem(weight_cases.three_layers(), weight_cases.LOSS, (x, y)))


STEPS = {
    PLAIN: of_keras(steps.plain),
    steps.KERAS: of_keras(steps.keras_scaled),
    "LossScaler by hand": weight_cases.by_hand,
    "TrainStep": weight_cases.train_step,
    "TrainStep, select=True": weight_cases.selecting,
}


def walked(step: Callable) -> list[dict]:
    """How many files and functions of `scaler` run while a step is traced, with the search for mistakes and without.

    Comprehensions are no functions: whether they run as such depends on Python's version.
    """
    seen = set()

    def notice(frame, event: str, _) -> None:
        code = frame.f_code
        if event == "call" and not code.co_name.endswith(("comp>", "genexpr>")):
            seen.add((pathlib.Path(code.co_filename), code.co_firstlineno, code.co_name))

    sys.setprofile(notice)
    try:
        tf.function(step).get_concrete_function()
    finally:
        sys.setprofile(None)
    ours = [one for one in seen if one[0].is_relative_to(HOME)]
    rest = [one for one in ours if not one[0].is_relative_to(HOME / "misuse")]
    return [
        {"traced by hand": name, "files": len({path for path, *_ in found}), "functions": len(found)}
        for name, found in (("scaler", ours), ("scaler without scaler/misuse", rest))
    ]


def weighed(quick: bool) -> list[dict]:
    """A row for each step. Its ratio is the median over the rounds; the quartiles follow it."""
    made = {jit: {name: tf.function(make(), jit_compile=jit) for name, make in STEPS.items()} for jit in (None, True)}
    taken = {jit: paired.take_turns(made[jit], SECONDS, quick) for jit in made}
    return [
        {
            "step": name,
            "operations": len(list(weight_cases.all_operations(made[None][name].get_concrete_function().graph))),
            **weight_cases.program(made[True][name]),
            f"graph, to {PLAIN}": paired.ratio(taken[None], name, PLAIN),
            f"XLA, to {PLAIN}": paired.ratio(taken[True], name, PLAIN),
        }
        for name in STEPS
    ]


def show(console: rich.console.Console, rows: list[dict]) -> None:
    table = rich.table.Table(*rows[0], box=rich.box.SIMPLE)
    for row in rows:
        table.add_row(*map(_text, row.values()))
    console.print(table)


def _text(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    median, (low, high) = value
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="two rounds, to see that it runs")
    options = parser.parse_args()
    machine = paired.machine()
    # First, since what a trace has run some functions remember.
    walk = walked(weight_cases.by_hand())
    rows = weighed(options.quick)
    if options.json:
        found = {"benchmark": "weight_of_step", "machine": machine, "quick": options.quick}
        print(json.dumps({**found, "steps": rows, "walk": walk}, indent=2))
        return
    console = rich.console.Console(width=None if sys.stdout.isatty() else 150)
    console.print(" · ".join(f"{key} {value}" for key, value in machine.items()))
    show(console, rows)
    show(console, walk)


if __name__ == "__main__":
    main()
