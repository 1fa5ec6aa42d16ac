"""`halfstep completion`: scripts that have a shell complete commands, options and names."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from halfstep.names import EFFECTS, IMAGE_TASKS, POLICIES, PRESETS, SETUPS, STRATEGIES, TASKS, TUNED

if TYPE_CHECKING:
    from halfstep.parsing import Parser

SHELLS = ("bash", "zsh", "fish")
_NAMES: Mapping[tuple[str, str], Sequence[str]] = {
    ("train", "task"): TASKS,
    ("train", "--policy"): POLICIES,
    ("train", "--strategy"): ("none", *STRATEGIES, *PRESETS),
    ("study", "task"): IMAGE_TASKS,
    ("study", "--setup"): SETUPS,
    ("study", "--strategy"): ("none", *STRATEGIES, *PRESETS),
    ("study", "--preset"): (*EFFECTS, "list", "all"),
    ("replay", "--strategy"): ("none", *STRATEGIES, *PRESETS),
    ("tune", "--strategy"): TUNED,
    ("completion", "shell"): SHELLS,
}
"""What can be offered for an argument of a command; where nothing is known, the shell offers files."""

_BASH = """\
_halfstep() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" names=""
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}} $word" in
{cases}
    esac
    if [ "$COMP_CWORD" = 1 ]; then names="{commands}"; fi
    COMPREPLY=($(compgen -W "$names" -- "$word"))
}}
complete -o default -F _halfstep halfstep
"""


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "completion",
        help="print what has a shell complete commands, options and names",
        description='Prints a script for a shell. bash and zsh: eval "$(halfstep completion bash)" in ~/.bashrc, '
        "with zsh in ~/.zshrc. fish: halfstep completion fish > ~/.config/fish/completions/halfstep.fish",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"{', '.join(SHELLS[:-1])} or {SHELLS[-1]}")


def run(options: argparse.Namespace) -> None:
    """Prints the script."""
    print({"bash": bash, "zsh": zsh, "fish": fish}[options.shell](), end="")


def bash() -> str:
    """The script for bash."""
    from halfstep.parsing import parser as all_commands

    parser = all_commands()
    lines = []
    for command, one in parser.commands.items():
        for option in [option for action in _named(one) if action.nargs != 0 for option in action.option_strings]:
            lines.append(_case(f'"{command} {option} "*', _NAMES.get((command, option), ())))
        lines += [_case(f'"{command} "*" -"*', _options(one)), _case(f'"{command} "*', _positional(command, one))]
    return _BASH.format(cases="\n".join(lines), commands=" ".join([*parser.commands, *_options(parser)]))


def zsh() -> str:
    """The script for zsh, which reads bash's."""
    return f"autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n{bash()}"


def fish() -> str:
    """The script for fish."""
    from halfstep.parsing import parser as all_commands

    parser = all_commands()
    first = "complete -c halfstep -n __fish_use_subcommand -f"
    lines = [f"{first} -a {name} -d {shlex.quote(said)}" for name, said in _said(parser)]
    lines += [f"{first} {_fish(action)}" for action in _named(parser)]
    for command, one in parser.commands.items():
        here = f"complete -c halfstep -n '__fish_seen_subcommand_from {command}'"
        if words := _positional(command, one):
            lines.append(f"{here} -f -a '{' '.join(words)}'")
        for action in _named(one):
            known = [name for option in action.option_strings for name in _NAMES.get((command, option), ())]
            takes = "" if action.nargs == 0 else f" -x -a '{' '.join(known)}'" if known else " -r"
            lines.append(f"{here} {_fish(action)}{takes}")
    return "\n".join([*lines, ""])


def _said(parser: Parser) -> list[tuple[str, str]]:
    """Each command, and what it does."""
    return [(name, one.summary) for name, one in parser.commands.items()]


def _named(parser: Parser) -> list[argparse.Action]:
    """The arguments that are options."""
    return [action for action in parser.declared() if action.option_strings]


def _options(parser: Parser) -> list[str]:
    return [option for action in _named(parser) for option in action.option_strings]


def _positional(command: str, parser: Parser) -> list[str]:
    """What can be offered for the arguments that are not options."""
    return [
        name
        for action in parser.declared()
        if not action.option_strings
        for name in _NAMES.get((command, action.dest), ())
    ]


def _fish(action: argparse.Action) -> str:
    """An option as `complete` of fish takes it."""
    return " ".join(
        f"-l {option[2:]}" if option[:2] == "--" else f"-s {option[1:]}" for option in action.option_strings
    )


def _case(pattern: str, names: Sequence[str]) -> str:
    return f"    {pattern}) names='{' '.join(names)}' ;;"
