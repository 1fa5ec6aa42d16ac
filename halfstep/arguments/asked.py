"""A parser that can be asked what it takes."""

from __future__ import annotations

import argparse
from typing import Any


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
