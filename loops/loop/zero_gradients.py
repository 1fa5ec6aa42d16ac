"""Applied steps whose gradients have a norm of zero and whose loss is not zero: 16 bits may have flushed them."""

from __future__ import annotations

import numpy as np

from loops.loop.visit import Visit

MANY = 20
"""So many applied steps in a row are worth a word. A few may be a saturated batch."""


class ZeroGradients:
    """Counts such steps, and says so once.

    Args:
        of: Whose steps they are, as the end of "steps"; "" for those of the run.
    """

    def __init__(self, of: str = "") -> None:
        self._of = of
        self._row = 0
        self._said = False

    def sentence(self, visit: Visit) -> str | None:
        """A warning, the first time that the last twenty applied steps are all such; else None.

        Args:
            visit: Its step returns `applied`, `grad_norm` and `loss`; of others nothing is known.
        """
        outputs = visit.outputs
        if self._said or not {"applied", "grad_norm", "loss"} <= set(outputs):
            return None
        self._row = in_a_row(outputs["applied"], outputs["grad_norm"], outputs["loss"], self._row)
        if self._row < MANY:
            return None
        self._said = True
        return (
            f"Step {visit.counters.data:,}: the gradients of the last {self._row:,} applied steps{self._of} had a norm "
            "of exactly zero, though their loss is not zero. The usual reason is that 16 bits flush small gradients to "
            "zero: use a larger loss scale. If that does not help, the loss does not depend on the weights here, for "
            "example because it is clipped. `halfstep explain` tries larger scales."
        )


def in_a_row(applied: np.ndarray, grad_norm: np.ndarray, loss: np.ndarray, before: int = 0) -> int:
    """How many of the last applied steps have a gradient norm of exactly 0 and a finite loss that is not.

    Args:
        applied: Bool [steps]. Other steps do not count, and do not end the row.
        grad_norm: [steps].
        loss: [steps].
        before: How many there were just before these steps.
    """
    if not len(applied):
        return before
    applied = np.asarray(applied, bool)
    zero = ((grad_norm == 0) & np.isfinite(loss) & (loss != 0))[applied]
    (others,) = np.nonzero(~zero)
    return len(zero) - 1 - int(others[-1]) if len(others) else before + len(zero)
