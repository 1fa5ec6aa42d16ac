"""What every command takes. Nothing here imports TensorFlow, NumPy or Keras."""

from __future__ import annotations

from halfstep.arguments import (
    compare,
    completion,
    cure,
    doctor,
    explain,
    inspect,
    lint,
    observe,
    replay,
    report,
    study,
    train,
    tune,
    watch,
)
from halfstep.arguments.asked import Commands, Parser
from halfstep.arguments.version import PrintVersions

_COMMANDS = (
    study,
    train,
    watch,
    report,
    compare,
    lint,
    inspect,
    explain,
    cure,
    observe,
    replay,
    tune,
    doctor,
    completion,
)


def parser() -> Parser:
    """The parser of all commands; `command` of what it parses is the one that was named."""
    result = Parser(prog="halfstep", description="Mixed-precision training with a loss scaler you can take apart.")
    result.add_argument("--version", action=PrintVersions, help="print this version, and TensorFlow's and Keras's")
    commands = Commands(result)
    for module in _COMMANDS:
        module.add_parser(commands)
    return result
