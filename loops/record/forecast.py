"""Warns of a run that seems to diverge, while it runs or from its trace."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import scaler
from loops.loop.visit import Visit
from loops.record.divergence import AHEAD, Alarm, Evidence, Seen, look, look_ahead
from loops.record.trace.tensors import Tensor, tensors_of
from loops.record.trace.visit_columns import columns_of, seen_in
from loops.step.composed_step import ComposedStep
from loops.support.errors import DivergenceWarning, ResumeWarning

if TYPE_CHECKING:
    from loops.loop.loop import Loop

_GRADIENTS = ("activation_gradients", "weight_gradients")


def forecast(steps: Any) -> Alarm | None:
    """The first step of a trace at which the run seems to diverge; None if there is none.

    Args:
        steps: The columns `step`, `loss`, `loss_scale`, `critical_low`, `critical_high` and `headroom` of a trace, from
            the run's first step on: `loops.observe.read(path).steps`, its DataFrame, or a dict of arrays.

    Raises:
        scaler.InvalidArgument: If a column is missing, or a step.
    """
    names = ("step", "loss", "loss_scale", "critical_low", "critical_high", "headroom")
    try:
        columns = {name: np.asarray(steps[name], np.float64) for name in names}
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise scaler.InvalidArgument(
            f"forecast: expected the columns {', '.join(names)}, as in hs.observe.read(path).steps."
        ) from error
    if any(values.ndim != 1 or len(values) != len(columns["step"]) for values in columns.values()):
        shapes = ", ".join(f"{name} {list(values.shape)}" for name, values in columns.items())
        raise scaler.InvalidArgument(f"forecast: got columns of the shapes {shapes}: expected a number for each step.")
    if len(columns["step"]) and columns["step"][0] != 1:
        raise scaler.InvalidArgument(
            f"forecast: the steps begin with {columns['step'][0]:.0f}, but the forecast depends on earlier gradients: "
            "expected all steps from 1 on."
        )
    gaps = np.flatnonzero(np.diff(columns["step"]) != 1)
    if len(gaps):
        before, after = columns["step"][gaps[0]], columns["step"][gaps[0] + 1]
        raise scaler.InvalidArgument(
            f"forecast: step {after:.0f} follows step {before:.0f}: expected every step from 1 on, in order."
        )
    critical = columns["critical_low"]
    # It is infinite if no measured tensor carries the scale, and 0 at an overflow.
    if len(critical) and (np.isnan(critical) | np.isposinf(critical)).all():
        raise scaler.InvalidArgument(
            "forecast: the trace has no critical scales, because no gradients were measured: expected one of a "
            "TrainStep(..., probes=hs.observe.watch(model))."
        )
    return _fold(Seen(), columns)[1]


def _fold(seen: Seen, columns: Mapping[str, np.ndarray]) -> tuple[Seen, Alarm | None]:
    """The state after these steps, or after the first that is a reason for alarm, and the alarm."""
    critical, loss, scale = columns["critical_low"], columns["loss"], columns["loss_scale"]
    # The size of the gradients is unknown for a step that overflowed, and for one whose gradients are all zero.
    known = (critical > 0) & np.isfinite(critical) & np.isfinite(columns["critical_high"]) & np.isfinite(loss)
    measured = ~np.isnan(columns["headroom"])
    for row in np.flatnonzero(known | measured):
        grows, within, headroom = False, math.inf, float(columns["headroom"][row])
        if measured[row]:
            seen, within = look_ahead(seen, headroom)
        if known[row]:
            seen, grows = look(seen, float(critical[row]), float(loss[row]))
        if grows or within <= AHEAD:
            evidence = Evidence.GROWTH if grows else Evidence.HEADROOM
            left = math.log2(critical[row] / scale[row]) if critical[row] > 0 else 0.0
            step = int(columns["step"][row])
            return seen, Alarm(step, left, headroom, seen.rise, evidence, seen.above, seen.rising, within)
    return seen, None


def _as_json(value: Any) -> Any:
    """The value, or a list of these, with None in the place of infinity, which JSON lacks."""
    if isinstance(value, tuple):
        return [_as_json(one) for one in value]
    return None if value == math.inf else value


def _from_json(value: Any) -> Any:
    """What `_as_json` was given."""
    if isinstance(value, list):
        return tuple(_from_json(one) for one in value)
    return math.inf if value is None else value


class Forecast:
    """Runs `forecast` during a run, and warns once, with a `DivergenceWarning`, when the run seems to diverge.

    It checks at each visit, so with `steps_per_call=100` it may warn 99 steps late. It needs a train step with probes
    of gradients, and must see a run from its first step on, or resume from a `Checkpoint` that has its state.
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
        if isinstance(loop.train_step, ComposedStep):
            raise scaler.InvalidArgument(
                "Forecast: a ComposedStep has no loss of its own that could rise: expected a TrainStep. Let it see the "
                "parts in TensorBoard, or in the report of an hs.Trace."
            )
        probes = getattr(loop.train_step, "probes", None)
        if probes is None:
            raise scaler.InvalidArgument(
                "Forecast: the train step has no probes, which measure gradients: expected "
                "TrainStep(..., probes=hs.observe.watch(model))."
            )
        kinds = getattr(probes, "kinds", _GRADIENTS)
        if not {*kinds} & {*_GRADIENTS}:
            raise scaler.InvalidArgument(
                f"Forecast: the probes measure {', '.join(kinds)}, but it needs gradients: expected a watch whose "
                f"kinds include {' or '.join(_GRADIENTS)}."
            )
        self._train_step = loop.train_step

    def save_state(self) -> dict:
        """The state of the forecast, for a `Checkpoint`."""
        seen = {name: _as_json(value) for name, value in self._seen._asdict().items()}
        return {"warned": self._warned, "began": self._began, "seen": seen}

    def load_state(self, value: dict) -> None:
        """Restores what `save_state` returned."""
        self._warned, self._began = value["warned"], value["began"]
        self._seen = Seen(**{name: _from_json(one) for name, one in value["seen"].items()})

    def __call__(self, visit: Visit) -> None:
        """Checks the steps of a visit."""
        if self._warned:
            return
        if visit.first > 1 and not self._began:
            self._warned = True
            warnings.warn(
                f"Forecast: it begins at step {visit.first}, but the forecast depends on earlier gradients. It will "
                "not warn: let it see a run from its first step on.",
                ResumeWarning,
                stacklevel=2,
            )
            return
        self._began = True
        self._tensors = self._tensors or tensors_of(self._train_step)
        columns = columns_of(visit, self._tensors, self._train_step, seen_in(visit, self._train_step))
        step = visit.first + np.arange(len(columns["critical_low"]))
        self._seen, alarm = _fold(self._seen, {**columns, "step": step})
        if alarm:
            self._warned = True
            warnings.warn(str(alarm), DivergenceWarning, stacklevel=2)
