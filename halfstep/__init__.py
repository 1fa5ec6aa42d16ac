"""Mixed-precision training for TensorFlow: `import halfstep as hs`.

The names that a first program needs, each the same object as in its package: `hs.LossScaler` is `scaler.LossScaler`,
and `hs.Loop` is `loops.Loop`. Everything else is in `hs.scaler` and `hs.loops`.

A name is imported when it is asked for, because the command `halfstep` answers `--help` without TensorFlow.
"""

from __future__ import annotations

import contextlib
import importlib
import pathlib
import types
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
        if name == "main":
            value: object = importlib.import_module("halfstep.command").main
        elif name in ("scaler", "loops"):
            value = _package(name)
        elif name in __all__:
            value = getattr(_package("loops" if name in _LOOPS else "scaler"), name)
        else:
            raise AttributeError(f"module 'halfstep' has no attribute {name!r}{_elsewhere(name)}")
        globals()[name] = value
        return value

    def _package(name: str) -> types.ModuleType:
        """Imports a package of ours. ImportError: If a file of the user hides it, or the one that it needs."""
        # `loops` needs `scaler`, which needs nothing of ours.
        hidden = importlib.import_module("halfstep.hiding").hidden(("scaler", name))
        if hidden:
            raise ImportError(hidden)
        return importlib.import_module(name)


def _elsewhere(name: str) -> str:
    """Where a public name of `scaler` or `loops` is, as the end of a sentence; read from their text, which is fast."""
    folder, found = pathlib.Path(__file__).parent.parent, []
    for package in ("scaler", "loops"):
        with contextlib.suppress(OSError):  # As in an archive.
            text = (folder / package / "__init__.py").read_text(encoding="utf-8")
            names = text.partition("\n__all__ = [")[2].partition("\n]")[0]
            if f'\n    "{name}",' in names:
                found.append(f"hs.{package}.{name}")
    return f": it is {' or '.join(found)}" if found else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "main"})
