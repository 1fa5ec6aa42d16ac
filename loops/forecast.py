"""A warning before a run diverges: gradients as large as ever, while the loss rises.

A run that diverges has gradients that grow, so that its critical scale falls. It falls in healthy runs, too, while the
loss falls fast, and a loss rises for a while in healthy runs. Both together were seen in diverging runs alone: the
figures are in docs/trace.md.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import scaler
from loops.errors import DivergenceWarning, ResumeWarning
from loops.trace.measured import columns_of
from loops.trace.tensors import Tensor, tensors_of
from loops.visit import Visit

if TYPE_CHECKING:
    from loops.loop import Loop

MEAN_OF = 8
"""Steps whose mean is looked at."""
LAG = 16
"""Steps by which what it is compared with lies back."""
RISE = 0.4
"""How far the loss must have risen, as a share of its lowest value."""


class Alarm(NamedTuple):
    """A run that diverges.

    Attributes:
        step: The step at which it was seen.
        left: Octaves from the step's largest gradient, at the step's loss scale, to an overflow.
        headroom: Octaves from the step's largest activation or weight to an overflow.
        rise: How far the loss had risen, as a share of its lowest value.
    """

    step: int
    left: float
    headroom: float
    rise: float

    def __str__(self) -> str:
        return (
            f"at step {self.step} the run seems to diverge: its gradients are as large as ever, and its loss has risen "
            f"by {self.rise:.0%} over its lowest. Gradients have {self.left:.0f} octaves left before they overflow at "
            f"this loss scale, activations and weights {self.headroom:.0f}. Lower the learning rate, or clip."
        )


class Seen(NamedTuple):
    """What a forecast remembers of the steps so far.

    Attributes:
        critical: Log2 of the critical scale at the last steps.
        loss: The loss at these steps.
        lows: The lowest mean of the first so far, at each of the last steps.
        best: The lowest mean of the second so far.
    """

    critical: tuple[float, ...] = ()
    loss: tuple[float, ...] = ()
    lows: tuple[float, ...] = ()
    best: float = math.inf


def look(seen: Seen, critical: float, loss: float) -> tuple[Seen, float | None]:
    """What is remembered after a step, and the rise of the loss if it is a reason for alarm.

    Args:
        seen: What was remembered before it.
        critical: The critical scale, finite and above 0.
        loss: Finite.
    """
    last, losses = (*seen.critical, math.log2(critical))[-MEAN_OF:], (*seen.loss, loss)[-MEAN_OF:]
    if len(last) < MEAN_OF:
        return Seen(last, losses), None
    mean, mean_loss = sum(last) / MEAN_OF, sum(losses) / MEAN_OF
    lows, best = (*seen.lows, min([mean, *seen.lows[-1:]]))[-LAG - 1 :], min(seen.best, mean_loss)
    rise = (mean_loss - best) / abs(best) if best else math.inf if mean_loss > best else 0.0
    alarm = len(lows) > LAG and mean <= lows[0] and rise >= RISE
    return Seen(last, losses, lows, best), rise if alarm else None


def forecast(steps: Any) -> Alarm | None:
    """The first step of a trace at which the run seems to diverge; None if there is none.

    Args:
        steps: The columns `step`, `loss`, `loss_scale`, `critical_low`, `critical_high` and `headroom` of a trace by
            their names, from the run's first step on: `loops.observe.read(path).steps`, its DataFrame, or a dict of
            arrays.

    Raises:
        scaler.InvalidArgument: If one of them is missing, or the first step is.
    """
    names = ("step", "loss", "loss_scale", "critical_low", "critical_high", "headroom")
    try:
        columns = {name: np.asarray(steps[name], np.float64) for name in names}
    except (KeyError, TypeError, IndexError) as error:
        raise scaler.InvalidArgument(
            f"forecast: expected the columns {', '.join(names)}, such as loops.observe.read(path).steps has them."
        ) from error
    if len(columns["step"]) and columns["step"][0] != 1:
        raise scaler.InvalidArgument(
            f"forecast: the steps begin with {columns['step'][0]:.0f}, and how large gradients were before decides: "
            "expected all steps from 1 on."
        )
    return _fold(Seen(), columns)[1]


def _fold(seen: Seen, columns: Mapping[str, np.ndarray]) -> tuple[Seen, Alarm | None]:
    """What is remembered after these steps, or up to the first that is a reason for alarm, and the alarm."""
    critical, loss, scale = columns["critical_low"], columns["loss"], columns["loss_scale"]
    # A step that overflowed does not say how large its gradients were, nor one whose gradients are all zero.
    known = (critical == columns["critical_high"]) & (critical > 0) & np.isfinite(critical) & np.isfinite(loss)
    for row in np.flatnonzero(known):
        seen, rise = look(seen, float(critical[row]), float(loss[row]))
        if rise is not None:
            left = math.log2(critical[row] / scale[row])
            return seen, Alarm(int(columns["step"][row]), left, float(columns["headroom"][row]), rise)
    return seen, None


class Forecast:
    """Warns once, with a `DivergenceWarning`, when the run seems to diverge: `forecast`, while it runs.

    It looks at each visit, so with `steps_per_call=100` it may say so 99 steps late. It needs a train step with probes
    of gradients, and has to see a run from its first step on, or to go on from a `Checkpoint` that has its state.
    """

    chief_only = True

    def __init__(self) -> None:
        self._seen = Seen()
        self._warned = self._began = False
        self._train_step: Any = None
        self._tensors: list[Tensor] = []

    def begin(self, loop: Loop) -> None:
        """Before the first step: makes sure that the train step has probes.

        Raises:
            scaler.InvalidArgument: If it has none.
        """
        if getattr(loop.train_step, "probes", None) is None:
            raise scaler.InvalidArgument(
                "Forecast: the train step has no probes, by which gradients are measured: expected "
                "TrainStep(..., probes=scaler.observe.watch(model))."
            )
        self._train_step = loop.train_step

    def save_state(self) -> dict:
        """What it remembers, for a `Checkpoint`."""
        seen = self._seen
        # JSON has no infinity.
        best = None if math.isinf(seen.best) else seen.best
        return {
            "warned": self._warned,
            "began": self._began,
            "recent": [list(seen.critical), list(seen.loss), list(seen.lows)],
            "best": best,
        }

    def load_state(self, value: dict) -> None:
        """Takes what `save_state` returned."""
        best = math.inf if value["best"] is None else value["best"]
        critical, loss, lows = (tuple(recent) for recent in value["recent"])
        self._warned, self._began = value["warned"], value["began"]
        self._seen = Seen(critical, loss, lows, best)

    def __call__(self, visit: Visit) -> None:
        """Looks at the steps of a visit."""
        if self._warned:
            return
        if visit.first > 1 and not self._began:
            self._warned = True
            warnings.warn(
                f"Forecast: it begins at step {visit.first}, and how large gradients were before decides. It will warn "
                "of nothing: let it see a run from its first step on.",
                ResumeWarning,
                stacklevel=2,
            )
            return
        self._began = True
        self._tensors = self._tensors or tensors_of(self._train_step)
        columns = columns_of(visit, self._tensors)
        step = visit.first + np.arange(len(columns["critical_low"]))
        self._seen, alarm = _fold(self._seen, {**columns, "step": step})
        if alarm:
            self._warned = True
            warnings.warn(str(alarm), DivergenceWarning, stacklevel=2)
