"""`halfstep inspect`: the contents of a checkpoint."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "inspect", help="show what a run's newest checkpoint holds, without building the model"
    )
    parser.add_argument("directory", metavar="DIR", help="a folder of checkpoints, or the --out of a run")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    from loops.loop.state.folder import describe
    from loops.record.files import CHECKPOINTS, to_json

    found = describe(options.directory, CHECKPOINTS)
    print(to_json(found) if options.json else text(found))


def text(found: dict) -> str:
    """A description as text."""
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
