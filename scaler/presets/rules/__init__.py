"""The state machines behind the presets that `scaler.Dynamic` cannot be."""

from scaler.presets.rules.climbs import FirstOverflow as FirstOverflow
from scaler.presets.rules.climbs import Log2 as Log2
from scaler.presets.rules.climbs import Spaced as Spaced
from scaler.presets.rules.streak import OneStepLate as OneStepLate
from scaler.presets.rules.streak import Streak as Streak
from scaler.presets.rules.tolerance import MovingWindow as MovingWindow
from scaler.presets.rules.tolerance import SkippedAtFloor as SkippedAtFloor
from scaler.presets.rules.tolerance import Tolerance as Tolerance

__all__ = [
    "FirstOverflow",
    "Log2",
    "MovingWindow",
    "OneStepLate",
    "SkippedAtFloor",
    "Spaced",
    "Streak",
    "Tolerance",
]
