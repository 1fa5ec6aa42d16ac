"""Makes every hand-made breakage in a copy of the repository and requires its test to go red.

    python tests/mutants/check.py [--select] [NAME ...]

With `--select`, steps select their new values, and breakages that only a branch can suffer are left out. Exits with 1
if a breakage goes unnoticed, if its old text does not stand in the file once (then renew it, or drop it with the code
it was about), or if a test is red without it.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import tempfile
import time

import pytest_server
from breakages import BREAKAGES, Breakage

GREEN, RED = 0, 1


def main() -> int:
    """Prints one line a breakage and returns 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="breakages; all if none is given")
    parser.add_argument("--select", action="store_true", help="run the tests with steps that select")
    options = parser.parse_args()
    start, wrong = time.monotonic(), 0
    chosen = _chosen(options.names, options.select)
    mode = ["--select"] if options.select else []
    with tempfile.TemporaryDirectory(prefix="halfstep-breakages-") as folder:
        copy = pathlib.Path(folder) / "repo"
        pytest_server.copy_repository(copy)
        with pytest_server.Server(copy) as socket:
            code, output = _pytest(socket, [*mode, *sorted({breakage.test for breakage in chosen.values()})])
            if code != GREEN:
                print(output, "\nred without any breakage: nothing can be said")
                return 1
            for name, breakage in chosen.items():
                verdict = _verdict(copy, socket, breakage, mode)
                wrong += bool(verdict)
                print(f"{verdict or 'noticed':20} {name:40} {breakage.test}", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} breakages were noticed, {time.monotonic() - start:.0f} s")
    return int(wrong > 0)


def _chosen(names: list[str], select: bool) -> dict[str, Breakage]:
    """The breakages that have to be noticed in this mode."""
    named = {name: BREAKAGES[name] for name in names} if names else BREAKAGES
    other = "branching" if select else "selecting"
    return {name: breakage for name, breakage in named.items() if breakage.only != other}


def _verdict(copy: pathlib.Path, socket: str, breakage: Breakage, mode: list[str]) -> str:
    """What is wrong, or nothing."""
    broken, path = breakage.broken(copy), copy / breakage.file
    if broken is None:
        return "DOES NOT APPLY"
    whole = path.read_text(encoding="utf-8")
    path.write_text(broken, encoding="utf-8")
    code, output = _pytest(socket, [*mode, "-x", breakage.test])
    path.write_text(whole, encoding="utf-8")
    if code == RED:
        return ""
    return "WENT UNNOTICED" if code == GREEN else f"BROKE PYTEST\n{output}"


def _pytest(socket: str, arguments: list[str]) -> tuple[int, str]:
    command = [sys.executable, pytest_server.__file__, "ask", socket, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main())
