"""The parser of all commands. Nothing here imports TensorFlow, NumPy or Keras."""

from __future__ import annotations

import argparse
import platform
from typing import Any

from halfstep.commands import (
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

_COMMANDS = (train, report, watch, explain, inspect, doctor, lint, completion)
_EXPERIMENTS = (study, replay, tune, compare, cure, observe)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; it stores the name of the chosen one as `command`."""
    result = argparse.ArgumentParser(
        prog="halfstep", description="Mixed-precision training with a loss scaler you can take apart."
    )
    result.add_argument("--version", action=PrintVersions, help="print this version, and TensorFlow's and Keras's")
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add_parser(commands)
    lab = commands.add_parser(
        "lab",
        help="experiments with precisions and strategies: study, replay, tune, compare, cure, observe",
        description="Experiments: what another precision, strategy or layer would have done.",
    )
    experiments = lab.add_subparsers(dest="command", required=True, metavar="EXPERIMENT")
    for module in _EXPERIMENTS:
        module.add_parser(experiments)
    return result


class PrintVersions(argparse.Action):
    """Prints the installed versions without importing the packages, and exits."""

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
    """The version of the package that provides a module: several packages provide TensorFlow."""
    import importlib.metadata as metadata

    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        packages = metadata.packages_distributions().get(module, [])
        return metadata.version(packages[0]) if packages else "not installed"
