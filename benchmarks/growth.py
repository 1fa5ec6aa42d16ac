"""How the gate's cost grows with the number of tensors that its parameters are in.

    python benchmarks/growth.py [--json] [--quick]

Adam on float32 variables.
"""

from __future__ import annotations

import gate
import numpy as np
import paired

COUNTS = (10, 100, 1000)
PARAMETERS = 10**7
TENFOLD, TO_KERAS = 1.6, 0.5
SECONDS = 3.0


def contender(count: int, size: int, side: str):
    """A gated step of `count` tensors of `size` values."""
    make, jit = gate.CONTENDERS[side]
    # Zeros would do as weights; gradients of zero would be special.
    values = np.random.default_rng(0).standard_normal(size, np.float32)
    grads = [gate.tf.constant(values) for _ in range(count)]
    return make(grads, [np.zeros(size, np.float32)] * count, gate.OPTIMIZERS["Adam"], None, jit)


def run(quick: bool) -> paired.Report:
    shrink = 10**4 if quick else 1
    figures, found = [], {}
    by_count(figures, found, PARAMETERS // shrink, [count // 10 for count in COUNTS] if quick else COUNTS, quick)
    return paired.Report(figures, found)


def by_count(figures: list, found: dict, parameters: int, counts, quick: bool) -> None:
    """The same parameters in more tensors."""
    few, more, many = counts
    steps = {}
    for count in counts:
        for side in ("halfstep", "Keras LossScaleOptimizer", "Keras LossScaleOptimizer, jit"):
            # XLA takes a minute for Keras's step of a hundred variables, ten and more for one of a thousand.
            if count < 100 or not side.endswith("jit"):
                steps[f"{side}, {count} tensors"] = contender(count, parameters // count, side)
    taken = paired.take_turns(steps, SECONDS, quick)
    found[f"{parameters:.0e} parameters"] = paired.case(taken, f"halfstep, {few} tensors")
    ours = {count: f"halfstep, {count} tensors" for count in counts}
    figures.append(paired.figure(f"halfstep, {more} tensors: to {few} tensors", taken, ours[more], ours[few], TENFOLD))
    for count in counts:
        theirs = paired.best(taken, [name for name in steps if name.endswith(f" {count} tensors") and "Keras" in name])
        target = TO_KERAS if count == many else None
        figures.append(paired.figure(f"halfstep, {count} tensors: to {theirs}", taken, ours[count], theirs, target))


if __name__ == "__main__":
    paired.main(__doc__, "growth", run)
