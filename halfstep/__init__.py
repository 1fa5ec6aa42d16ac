"""Mixed-precision training for TensorFlow: `import halfstep as hs`.

The names that a first program needs, each the same object as in its package: `hs.LossScaler` is `scaler.LossScaler`,
and `hs.Loop` is `loops.Loop`. Everything else is in `hs.scaler` and `hs.loops`.

A name is imported when it is asked for, because the command `halfstep` answers `--help` without TensorFlow.
"""

from __future__ import annotations

import importlib
import typing

if typing.TYPE_CHECKING:
    import loops as loops
    import scaler as scaler
    from halfstep.command import main as main
    from loops import Checkpoint as Checkpoint
    from loops import JsonLines as JsonLines
    from loops import Loop as Loop
    from loops import Progress as Progress
    from loops import TrainStep as TrainStep
    from scaler import Dynamic as Dynamic
    from scaler import LossScaleLogger as LossScaleLogger
    from scaler import LossScaleOptimizer as LossScaleOptimizer
    from scaler import LossScaler as LossScaler
    from scaler import MasterWeights as MasterWeights
    from scaler import Static as Static
    from scaler import protect as protect
    from scaler import snapshot as snapshot

__all__ = [
    "Checkpoint",
    "Dynamic",
    "JsonLines",
    "Loop",
    "LossScaleLogger",
    "LossScaleOptimizer",
    "LossScaler",
    "MasterWeights",
    "Progress",
    "Static",
    "TrainStep",
    "loops",
    "protect",
    "scaler",
    "snapshot",
]

_LOOPS = ("Checkpoint", "JsonLines", "Loop", "Progress", "TrainStep")

if not typing.TYPE_CHECKING:  # A type checker would believe any name.

    def __getattr__(name: str) -> object:
        door = importlib.import_module("halfstep.front_door")
        if name == "main":
            value: object = importlib.import_module("halfstep.command").main
        elif name in __all__:
            owner = "loops" if name in (*_LOOPS, "loops") else "scaler"
            door.check_not_hidden(owner)
            package = importlib.import_module(owner)
            value = package if name == owner else getattr(package, name)
        else:
            raise AttributeError(f"module 'halfstep' has no attribute {name!r}{door.elsewhere(name, __all__)}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "main"})
