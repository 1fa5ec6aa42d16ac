"""The state machines behind the presets that `scaler.Dynamic` cannot be."""

from scaler.presets.rules.climbs import FirstOverflow, Log2, Spaced
from scaler.presets.rules.streak import OneStepLate, Streak
from scaler.presets.rules.tolerance import MovingWindow, SkippedAtFloor, Tolerance

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
