"""What every command takes. Nothing here imports TensorFlow, NumPy or Keras."""

from __future__ import annotations

import argparse
import platform
from typing import Any

from halfstep import (
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


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser`, as are those of its commands.

    Attributes:
        summary: What the command does, in a line.
        commands: The parsers of the commands, by name.
    """

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.summary = ""
        self.commands: dict[str, Parser] = {}

    def declared(self) -> list[argparse.Action]:
        """All that was added, options and other arguments."""
        return list(self._actions)


class Commands:
    """Where commands are added to a parser."""

    def __init__(self, parser: Parser):
        self._parser = parser
        self._action = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def add_parser(self, name: str, *, help: str, **arguments: Any) -> Parser:
        """As argparse's; keeps the parser and its line of help."""
        added = self._action.add_parser(name, help=help, **arguments)
        added.summary = help
        self._parser.commands[name] = added
        return added


class PrintVersions(argparse.Action):
    """Prints the installed versions, which it reads without importing what they are of, and ends the command."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Prints them."""
        print(versions())
        parser.exit()


def versions() -> str:
    """The versions in one line."""
    found = {"TensorFlow": _installed("tensorflow"), "Keras": _installed("keras"), "Python": platform.python_version()}
    return f"halfstep {_installed('halfstep')} ({', '.join(f'{name} {one}' for name, one in found.items())})"


def _installed(module: str) -> str:
    """The version of what a module is installed from: TensorFlow has several packages."""
    import importlib.metadata as metadata

    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        packages = metadata.packages_distributions().get(module, [])
        return metadata.version(packages[0]) if packages else "not installed"
