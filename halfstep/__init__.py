"""Mixed-precision training for TensorFlow: `import halfstep as hs`.

It has every public name of `scaler` and `loops`, each the same object: `hs.LossScaler` is `scaler.LossScaler`, and
`hs.Loop` is `loops.Loop`. `hs.Counters` is that of `loops`, which `Loop.run` returns, and `hs.observe` has the names of
`scaler.observe` and `loops.observe`.

A name is imported when it is asked for, because the command `halfstep` answers `--help` without TensorFlow.
"""

from __future__ import annotations

import importlib
import typing

if typing.TYPE_CHECKING:  # Of two names that are one the first counts.
    import loops as loops
    import scaler as scaler
    from halfstep import observe as observe
    from halfstep.command import main as main
    from loops import *  # type: ignore[no-redef] # noqa: F403
    from scaler import *  # type: ignore[no-redef,assignment] # noqa: F403
else:  # A type checker would believe any name.

    def __getattr__(name: str) -> object:
        door = importlib.import_module("halfstep.front_door")
        owners = door.owners()
        if name == "__all__":
            value: object = sorted(owners)
        elif name == "main":
            value = importlib.import_module("halfstep.command").main
        elif name in owners:
            value = door.imported(name, owners[name])
        else:
            raise door.missing(name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*importlib.import_module("halfstep.front_door").owners(), "main"])
