"""Commands that examine a program or a machine before it trains: `lint`, `doctor` and `lab observe`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from halfstep.commands.shared import EXIT_FOUND, count

if TYPE_CHECKING:
    from loops.diagnose.lint.subject import Finding


def add_doctor(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "doctor",
        help="times layers in each format, and says whether float16 pays here and how to run it; with --model, where "
        "the time and the memory of its training step go",
    )
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="a function of your program, importable from the current folder, that takes nothing, or the folder of a "
        "run (here an empty one), and returns an hs.Loop, or (model, optimizer, loss, sample)",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="with --model: draw its memory into FILE, such as memory.png or memory.html"
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> None:
    if options.model is not None:
        _examine_model(options)
    elif options.out is not None:
        import scaler

        raise scaler.InvalidArgument(f"--out {options.out} draws the memory of a model: name the model with --model.")
    else:
        _examine_machine(options)


def _examine_machine(options: argparse.Namespace) -> None:
    from halfstep.front_door import hiding_files, namesakes

    with _without_logs():
        from halfstep.terminal import width, working
        from loops.diagnose.doctor import layer_times
        from loops.diagnose.doctor.machine import about_gpus, machine, surroundings

        gpus, found = about_gpus(surroundings()), machine()
    others = [*namesakes(), *hiding_files(pathlib.Path.cwd())]
    with working("doctor: timing layers", moving=False):
        times = layer_times.measure()
    said, line = layer_times.verdict(times), layer_times.to_copy(times)
    if options.json:
        layers = layer_times.as_json(times)
        told = {"layers": layers, "verdict": said, "setting": line, "gpus": gpus, "namesakes": others}
        print(json.dumps({**found, **told}, indent=2))
        return
    print("  ".join(f"{name} {version}" for name, version in found["versions"].items()))
    for device in found["devices"]:
        capability = device["compute_capability"]
        print(device["name"] + (f"  compute capability {capability}" if capability else ""))
    print(f"\n{layer_times.table(times, width())}\n\n{said}\n    {line}")
    for sentence in gpus:
        print(sentence)
    for other in others:
        print(other["advice"])


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Keeps what TensorFlow logs while it starts off the terminal, unless that fails."""
    own = os.dup(2)
    with tempfile.TemporaryFile() as logged:
        os.dup2(logged.fileno(), 2)
        try:
            yield
        except BaseException:
            logged.seek(0)
            os.write(own, logged.read())
            raise
        finally:
            os.dup2(own, 2)
            os.close(own)


def _examine_model(options: argparse.Namespace) -> None:
    from halfstep.terminal import quiet, width, working
    from loops.diagnose.doctor import diagnosis
    from loops.diagnose.doctor.shown import check_picture, text, write_picture
    from loops.record.files import to_json
    from loops.support.user_function import called

    quiet()
    if options.out is not None:
        check_picture(options.out)
    with tempfile.TemporaryDirectory(prefix="halfstep-doctor-") as folder, working("doctor", moving=False) as progress:
        built = called(options.model, pathlib.Path(folder), option="--model")
        found = diagnosis.diagnose_built(
            built, f"--model {options.model}", seconds=diagnosis.SECONDS, progress=progress
        )
    print(to_json(found.as_dict()) if options.json else text(found, width()))
    if options.out is not None:
        write_picture(found.footprints, options.out)


def add_lint(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "lint",
        help="run each layer of a model at rising magnitudes, and report float16 problems",
        epilog=f"Exit status: 0 if no problem was found, {EXIT_FOUND} if any was. Notes do not count as problems.",
    )
    parser.add_argument(
        "--build",
        required=True,
        metavar="MODULE:FUNCTION",
        help="a function of your program, importable from the current folder, that takes nothing, or the folder of a "
        "run (here an empty one), and returns an hs.Loop, or (model, optimizer, loss, sample)",
    )
    parser.add_argument("--xla", action="store_true", help="also name the layers that XLA cannot compile")
    parser.add_argument(
        "--format", metavar="NAME", help="also name the layers that lose too much in a format such as float8_e4m3fn"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON list")
    parser.set_defaults(run=_lint)


def _lint(options: argparse.Namespace) -> int:
    from loops.diagnose.lint import lint_program
    from loops.support.user_function import called

    with tempfile.TemporaryDirectory(prefix="halfstep-lint-") as folder:
        program = called(options.build, pathlib.Path(folder))
        findings = lint_program(program, options.build, xla=options.xla, format=options.format)
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    elif findings:
        _print(findings)
    else:
        print("No known problems with float16 were found.")
    return EXIT_FOUND if any(not finding.is_note for finding in findings) else 0


def _print(findings: list[Finding]) -> None:
    from halfstep.terminal import folded

    for finding in findings:
        print(finding.layer or "all layers")
        for text in (finding.finding, f"measured: {finding.measured}", f"instead: {finding.instead}"):
            print(folded(text, indent="  "))
        print()


def add_observe(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("observe", help="run the same steps with and without probes, and report what differs")
    parser.add_argument("--verify", action="store_true", required=True, help="compare the weights by their digests")
    parser.add_argument(
        "--build",
        required=True,
        metavar="MODULE:FUNCTION",
        help="a function of your program, importable from the current folder, that takes nothing, or an empty folder "
        "for the run, and returns the hs.Loop",
    )
    parser.add_argument("--steps", type=count, default=10, help="steps of each run (default: 10)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_observe)


def _observe(options: argparse.Namespace) -> int:
    from loops.diagnose.verify import verify
    from loops.record.files import to_json
    from loops.support.user_function import called, in_empty_folders

    with in_empty_folders(lambda folder: called(options.build, folder)) as build:
        found = verify(build, options.steps)
    print(to_json({"neutral": found.neutral, **dataclasses.asdict(found)}) if options.json else found)
    return 0 if found.neutral else EXIT_FOUND
