"""What `halfstep completion` takes."""

from __future__ import annotations

from typing import Any

SHELLS = ("bash", "zsh", "fish")


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "completion",
        help="print what has a shell complete commands, options and names",
        description='Prints a script for a shell. bash and zsh: eval "$(halfstep completion bash)" in ~/.bashrc, '
        "with zsh in ~/.zshrc. fish: halfstep completion fish > ~/.config/fish/completions/halfstep.fish",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"{', '.join(SHELLS[:-1])} or {SHELLS[-1]}")
