"""Commands that read the files of runs: `report`, `watch`, `inspect` and `lab compare`."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
from typing import Any


def add_report(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "report",
        help="write one HTML file about runs: curves, skips, headroom, exponents",
        description="Writes one HTML file of at most 1 MB that needs no network: the loss, the loss scale with every "
        "skip and its cause, the headroom, the exponents of each tensor, and how it was made.",
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="the --out of halfstep train, a program's folder with its trace, its log or both, or one such file",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="(default: report.html in the run's folder, and for several runs in the current folder)",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="run the skipped step where the last trouble began again, as halfstep explain does; it takes from seconds "
        "to minutes for each run",
    )
    parser.add_argument("--build", metavar="MODULE:FUNCTION", help="for --explain, as for halfstep explain")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    import scaler
    from halfstep.terminal import quiet, working
    from loops.views.report import write_report

    if options.build and not options.explain:
        raise scaler.InvalidArgument("--build is for --explain, which runs a skipped step again: give both.")
    quiet()
    place = pathlib.Path(options.runs[0] if len(options.runs) == 1 else "")
    out = options.out or (place if place.is_dir() else place.parent) / "report.html"
    with working("report") as progress:
        size = write_report(
            options.runs,
            out,
            explain=options.explain,
            build=options.build,
            arguments=options.arguments,
            progress=progress,
        )
    print(f"wrote {out}, {size:,} bytes")


def add_watch(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "watch",
        help="follow a running run in the terminal",
        description="Shows step, loss, loss scale, headroom and skips of a run that another process trains, from the "
        "files that it appends to. It ends when the run has ended, and with Ctrl-C. In a pipe it prints a line every "
        "ten seconds.",
    )
    parser.add_argument("folder", metavar="RUN", help="the --out of halfstep train, or a program's folder")
    parser.set_defaults(run=_watch)


def _watch(options: argparse.Namespace) -> int:
    from halfstep.terminal import Console
    from loops.views.watch import watch

    # Ctrl-C ends only the watching; the run goes on.
    with contextlib.suppress(KeyboardInterrupt):
        watch(options.folder, Console())
    return 0


def add_compare(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "compare",
        help="where two runs part, tensor by tensor, by how much, and which is closer to float32",
        description="Compares the largest magnitude of each tensor that the traces of both runs have, gradients "
        "divided by the loss scale, and the losses. The result says something about the arithmetic only if both runs "
        "began with the same weights and took the same batches. The runs are aligned by applied updates; runs that do "
        "not record which steps were applied are aligned by steps. It also counts the batches that each run lost to "
        "skipped steps.",
    )
    parser.add_argument("first", metavar="RUN", help="the --out of halfstep train, a program's folder, or one file")
    parser.add_argument("second", metavar="RUN", help="the run to compare it with")
    parser.add_argument("reference", metavar="FLOAT32", nargs="?", help="the same run in float32, if neither is")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> None:
    from halfstep.terminal import quiet, width
    from loops.record.files import to_json
    from loops.views.compare.compare import compare

    quiet()
    found = compare(options.first, options.second, options.reference)
    print(to_json(found.to_dict()) if options.json else found.text(width()))


def add_inspect(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "inspect", help="show what a run's newest checkpoint holds, without building the model"
    )
    parser.add_argument("directory", metavar="DIR", help="a folder of checkpoints, or the --out of a run")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> None:
    from loops.loop.state.folder import describe
    from loops.record.files import CHECKPOINTS, to_json

    found = describe(options.directory, CHECKPOINTS)
    print(to_json(found) if options.json else text_of_checkpoint(found))


def text_of_checkpoint(found: dict) -> str:
    """The description of a checkpoint as text."""
    counters, data, random = found["counters"], found["data"], found["random"]
    lines = [f"checkpoint   {found['checkpoint']}  {found['bytes']:,} bytes"]
    lines += [f"damaged      step {step}: {why}" for step, why in found["damaged"].items()]
    others = [str(step) for step in found["others"] if str(step) not in found["damaged"]]
    lines.append(f"others       {', '.join(others) or 'none'}")
    lines.append("counters     " + "  ".join(f"{name} {value}" for name, value in counters.items()))
    if found["loss_scaler"]:
        lines.append(
            "loss scaler  " + "  ".join(f"{name} {_number(value)}" for name, value in found["loss_scaler"].items())
        )
    lines += [f"{name:13}{_line(value)}" for name, value in found["identity"].items() if value not in (None, {})]
    lines += [f"changed      from step {one['step']} on: {'; '.join(one['changed'])}" for one in found["changes"]]
    lines.append(
        f"data         {data['batches']} batches taken; position {'not saved' if data['problem'] else 'saved'}"
    )
    lines += [f"             {caveat}" for caveat in data["caveats"]]
    lines += [
        f"{group:13}{size['count']} variables, {size['values']:,} values" for group, size in found["variables"].items()
    ]
    if found["held"]:
        lines.append(f"step holds   {', '.join(found['held'])}")
    lines.append("random       " + "  ".join(f"{name} {_line(value)}" for name, value in random.items()))
    for name, one in found["evaluations"].items():
        lines.append(f"evaluated    {name} at step {one['step']}: {_results(one['results'])}")
    if found["actions"]:
        lines.append(f"actions      {', '.join(found['actions'])}")
    lines.append("versions     " + _line(found["versions"]))
    return "\n".join(lines)


def _results(found: dict) -> str:
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()
    )


def _number(value: Any) -> str:
    return f"of {len(value)} numbers" if isinstance(value, list) else f"{value:g}"


def _line(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {inner}" for name, inner in value.items())
    if isinstance(value, bool):
        return "saved" if value else "not saved"
    return "none" if value is None else str(value)
