"""Loss-scaling strategies: pure state machines, nothing stateful."""

from scaler.checks import suggest_arguments
from scaler.strategies.base import Event as Event
from scaler.strategies.base import Needs as Needs
from scaler.strategies.base import Strategy as Strategy
from scaler.strategies.base import after_step as after_step
from scaler.strategies.base import check_state as check_state
from scaler.strategies.base import float_bounds_of as float_bounds_of
from scaler.strategies.base import in_words as in_words
from scaler.strategies.base import needs_of as needs_of
from scaler.strategies.base import require_strategy as require_strategy
from scaler.strategies.base import usable_state as usable_state
from scaler.strategies.delayed_amax import DelayedAmax as DelayedAmax
from scaler.strategies.delayed_amax import DelayedAmaxState as DelayedAmaxState
from scaler.strategies.dynamic import Dynamic as Dynamic
from scaler.strategies.dynamic import DynamicState as DynamicState
from scaler.strategies.headroom import Headroom as Headroom
from scaler.strategies.headroom import HeadroomState as HeadroomState
from scaler.strategies.histogram import Histogram as Histogram
from scaler.strategies.histogram import HistogramState as HistogramState
from scaler.strategies.limits import Bounded as Bounded
from scaler.strategies.limits import RisingFloor as RisingFloor
from scaler.strategies.limits import Warmup as Warmup
from scaler.strategies.log_normal import LogNormal as LogNormal
from scaler.strategies.log_normal import LogNormalState as LogNormalState
from scaler.strategies.scheduled import Scheduled as Scheduled
from scaler.strategies.smooth import Smooth as Smooth
from scaler.strategies.smooth import SmoothState as SmoothState
from scaler.strategies.spike_guard import SpikeGuard as SpikeGuard
from scaler.strategies.static import NoScaling as NoScaling
from scaler.strategies.static import Static as Static
from scaler.strategies.static import StaticState as StaticState

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
