"""Runs the benchmarks of time and memory that need no GPU, each in a process of its own, and keeps what they found.

    python benchmarks/all.py [--quick] [--only gate] [--out benchmarks/results]

Writes `<date>.json` with all that was measured and `<date>.md` with the figures beside their targets. A benchmark that
fails leaves the others' results in place.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import subprocess
import sys

import pages

BENCHMARKS = (
    "sixteen_bits",
    "gate",
    "step",
    "selecting",
    "replicas",
    "first_call",
    "memory",
    "loop",
    "fit",
    "observe",
    "bounds",
)
_HERE = pathlib.Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes and two rounds, to see that it runs")
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="one benchmark; may be given again")
    parser.add_argument("--out", type=pathlib.Path, default=_HERE / "results", metavar="FOLDER")
    options = parser.parse_args()
    found, failed = [], []
    for name in options.only or BENCHMARKS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        command = [sys.executable, str(_HERE / f"{name}.py"), "--json", *(["--quick"] if options.quick else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            failed.append(name)
        else:
            found.append(json.loads(done.stdout))
    text = as_markdown(found)
    print(text)
    if found:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"{datetime.date.today().isoformat()}.json"
        path.write_text(json.dumps(found, indent=2) + "\n")
        path.with_suffix(".md").write_text(text)
        print(f"written to {path} and {path.with_suffix('.md').name}", file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def as_markdown(found: list[dict]) -> str:
    """The machine, and one table of figures for each benchmark."""
    lines = []
    if found:
        lines.append("; ".join(f"{key} {value}" for key, value in found[0]["machine"].items()) + "\n")
    for benchmark in found:
        lines.append(f"## {benchmark['benchmark']} ({benchmark['seconds']:.0f} s)\n")
        lines += [*pages.figures(benchmark["figures"]), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
