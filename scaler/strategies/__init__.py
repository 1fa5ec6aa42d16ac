"""Loss-scaling strategies, one file each: pure state machines, nothing stateful."""

from scaler.strategies.base import Event as Event
from scaler.strategies.base import Strategy as Strategy
from scaler.strategies.dynamic import Dynamic as Dynamic
from scaler.strategies.dynamic import DynamicState as DynamicState
from scaler.strategies.no_scaling import NoScaling as NoScaling
from scaler.strategies.static import Static as Static
from scaler.strategies.static import StaticState as StaticState
