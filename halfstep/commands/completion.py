"""`halfstep completion`: scripts that make a shell complete commands, options and names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from halfstep.commands import shared

SHELLS = ("bash", "zsh", "fish")
_NAMES: Mapping[tuple[str, str], Sequence[str]] = {
    ("train", "task"): shared.TASKS,
    ("train", "policy"): shared.POLICIES,
    ("train", "strategy"): ("none", *shared.STRATEGIES, *shared.PRESETS),
    ("study", "task"): shared.IMAGE_TASKS,
    ("study", "setup"): (*shared.SETUPS, *shared.EMULATED, *shared.UNIT_SCALED),
    ("study", "strategy"): ("none", *shared.STRATEGIES, *shared.PRESETS),
    ("replay", "strategies"): ("none", *shared.STRATEGIES, *shared.PRESETS),
    ("tune", "strategy"): shared.TUNED,
}
"""The completions for an argument of a command; argparse accepts more, such as `dynamic:growth_interval=200`."""
_ZSH = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }"


def add_completion(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "completion",
        help="print a script that makes a shell complete commands, options and names",
        description='Prints a script for a shell. bash and zsh: eval "$(halfstep completion bash)" in ~/.bashrc, '
        "with zsh in ~/.zshrc. fish: halfstep completion fish > ~/.config/fish/completions/halfstep.fish",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"{', '.join(SHELLS[:-1])} or {SHELLS[-1]}")
    parser.set_defaults(run=_completion)


def _completion(options: argparse.Namespace) -> None:
    print(script(options.parser, options.shell))


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completion script of a shell.

    Args:
        parser: The parser of all commands. It cannot parse arguments afterwards: completions become its only choices.
        shell: One of `SHELLS`.
    """
    import shtab

    for command, one in _commands(parser).items():
        for action in one._actions:
            if names := _NAMES.get((command, action.dest)):
                action.choices = names
            elif action.nargs != 0 and action.type is None and action.choices is None:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell, preamble=_ZSH if shell == "zsh" else "")


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, which argparse keeps as the choices of the first argument."""
    found = {}
    for action in parser._actions:
        if action.dest == "command" and isinstance(action.choices, dict):
            for name, one in action.choices.items():
                found.update({name: one, **_commands(one)})
    return found
