"""The command `halfstep`, also `python -m halfstep`.

A module of `commands` declares the arguments of its commands and the function that each runs. Only that imports
TensorFlow, so help and usage errors are fast. Standard output whose reader is gone is handled here.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import platform
import re
import select
import signal
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from halfstep.commands import examine, other_strategies, past_steps, read_runs, shared
from halfstep.commands.completion import add_completion
from halfstep.commands.study import add_study
from halfstep.commands.train import add_train
from halfstep.front_door import hidden

_COMMANDS = (
    add_train,
    read_runs.add_report,
    read_runs.add_watch,
    past_steps.add_explain,
    read_runs.add_inspect,
    examine.add_doctor,
    examine.add_lint,
    add_completion,
)
_EXPERIMENTS = (
    add_study,
    other_strategies.add_replay,
    other_strategies.add_tune,
    read_runs.add_compare,
    past_steps.add_cure,
    examine.add_observe,
)


class Parser(argparse.ArgumentParser):
    """Answers a wrong command or option with the nearest one, and a wrong option with the usage of its own command."""

    elsewhere: Sequence[str] = ()
    """What may have been meant beside its own commands."""

    def parse_known_args(self, *arguments: Any, **named: Any) -> Any:
        """Refuses arguments that are not known, also those of a command inside, which argparse passes on."""
        found, rest = super().parse_known_args(*arguments, **named)
        return (found, rest) if not rest else self.error(f"unrecognized arguments: {' '.join(rest)}")

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message, and exits."""
        wrong = re.search(r"invalid choice: '([^']+)'|unrecognized arguments: (--[\w-]+)", message)
        known = re.findall(r"(?<![\w-])-*\w[\w-]*", f"{self.format_usage()} {message.partition('choose from')[2]}")
        near = difflib.get_close_matches(wrong[1] or wrong[2], [*known, *self.elsewhere], n=1) if wrong else []
        super().error(message + "".join(f". Did you mean {one!r}?" for one in near))


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; it stores the name of the chosen one as `command`, and its function as `run`."""
    result = Parser(prog="halfstep", description="Mixed-precision training with a loss scaler you can take apart.")
    result.add_argument("--version", action=PrintVersions, help="print this version, and TensorFlow's and Keras's")
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)
    lab = commands.add_parser(
        "lab",
        help="experiments with precisions and strategies: study, replay, tune, compare, cure, observe",
        description="Experiments: what another precision, strategy or layer would have done.",
    )
    experiments = lab.add_subparsers(dest="command", required=True, metavar="EXPERIMENT")
    for add in _EXPERIMENTS:
        add(experiments)
    result.elsewhere = [f"lab {name}" for name in experiments.choices]
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Returns:
        An exit status: 0 for success, 1 for failure, 2 for a usage error; docs/commands.md lists all. After SIGINT or
        SIGTERM, a run that saves checkpoints has saved its last step, and --resume goes on from there.
    """
    try:
        try:
            return _answered(sys.argv[1:] if arguments is None else list(arguments))
        finally:
            if sys.stdout:  # While an error can still be reported.
                sys.stdout.flush()
    except BrokenPipeError:
        _give_up()
        return shared.EXIT_CLOSED_PIPE
    except OSError as error:
        _give_up()
        return _fail(f"standard output: {error.strerror or error}.", shared.EXIT_ERROR)


def _answered(arguments: list[str]) -> int:
    asked = parser()
    options = asked.parse_args(arguments)
    options.arguments, options.parser = arguments, asked
    try:
        with _termination_is_an_exit(), _warnings_without_code():
            return _run(options)
    except KeyboardInterrupt:
        return _fail("interrupted; what was written so far is kept.", shared.EXIT_INTERRUPTED)
    except SystemExit as error:
        if error.code != shared.EXIT_TERMINATED:
            raise
        return _fail("terminated; what was written so far is kept.", shared.EXIT_TERMINATED)


def _run(options: argparse.Namespace) -> int:
    # Hides TensorFlow's own log messages, except its errors.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if hides := hidden():
        return _fail(hides, shared.EXIT_ERROR)
    try:
        return options.run(options) or shared.EXIT_DONE
    except Exception as error:
        answer = _message_and_status(error, hasattr(options, "out"))
        if answer is None:
            raise
        return _fail(*answer)


def _message_and_status(error: Exception, has_out: bool) -> tuple[str, int] | None:
    """The message and exit status for an error; None for a closed pipe or a bug.

    Args:
        error: What ended the command.
        has_out: Whether the command has the option `--out`.
    """
    if isinstance(error, BrokenPipeError) and _reader_is_gone():
        return None
    # Both import TensorFlow.
    import scaler
    from loops.support.errors import WorkerLost

    if isinstance(error, scaler.InvalidArgument):
        return str(error), shared.EXIT_USAGE
    if isinstance(error, WorkerLost):
        return str(error), shared.EXIT_WORKER_LOST
    if isinstance(error, scaler.ScalerError):
        return str(error), shared.EXIT_ERROR
    if isinstance(error, OSError):
        reason = error.strerror or error
        if error.filename is None:
            return f"standard output, or a file that was being written: {reason}.", shared.EXIT_ERROR
        advice = " Choose a folder that can be written with --out." if has_out else ""
        return f"{error.filename}: {reason}.{advice}", shared.EXIT_ERROR
    return None


@contextlib.contextmanager
def _termination_is_an_exit() -> Iterator[None]:
    """Makes SIGTERM end the command as Ctrl-C does: files are closed, and the status is `EXIT_TERMINATED`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: types.FrameType | None) -> None:
        raise SystemExit(shared.EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _warnings_without_code() -> Iterator[None]:
    """Prints a warning as the command prints an error: the line of Halfstep that gives it tells its user nothing."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, category, *_: f"halfstep: {category.__name__}: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def _fail(message: str, status: int) -> int:
    print(f"halfstep: {message}", file=sys.stderr)
    return status


def _reader_is_gone() -> bool:
    """Whether standard output or standard error is a pipe whose reader is gone."""
    poll = select.poll()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            poll.register(stream.fileno(), select.POLLERR)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _give_up() -> None:
    """Discards output that cannot be written: otherwise Python would try again at exit."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
