"""Loss-scaling strategies: pure state machines, nothing stateful."""

from scaler.checks import suggest_arguments
from scaler.strategies.amax import DelayedAmax, DelayedAmaxState, Headroom, HeadroomState, LogNormal, LogNormalState
from scaler.strategies.base import (
    Event,
    Needs,
    Strategy,
    after_step,
    check_state,
    float_bounds_of,
    in_words,
    needs_of,
    require_strategy,
    usable_state,
)
from scaler.strategies.dynamic import Dynamic, DynamicState
from scaler.strategies.histogram import Histogram, HistogramState
from scaler.strategies.limits import Bounded, RisingFloor, Scheduled, Warmup
from scaler.strategies.smooth import Smooth, SmoothState
from scaler.strategies.spike_guard import SpikeGuard
from scaler.strategies.static import NoScaling, Static, StaticState

__all__ = [
    "Bounded",
    "DelayedAmax",
    "DelayedAmaxState",
    "Dynamic",
    "DynamicState",
    "Event",
    "Headroom",
    "HeadroomState",
    "Histogram",
    "HistogramState",
    "LogNormal",
    "LogNormalState",
    "Needs",
    "NoScaling",
    "RisingFloor",
    "Scheduled",
    "Smooth",
    "SmoothState",
    "SpikeGuard",
    "Static",
    "StaticState",
    "Strategy",
    "Warmup",
    "after_step",
    "check_state",
    "float_bounds_of",
    "in_words",
    "needs_of",
    "require_strategy",
    "usable_state",
]

suggest_arguments(globals())
