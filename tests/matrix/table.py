"""Runs the core of the tests in each of the environments named, and prints a table: `make matrix`.

    python tests/matrix/table.py ENVIRONMENT ...

Exits with 1 if anything failed anywhere. Needs the standard library only.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree

HERE = pathlib.Path(__file__).resolve().parent
PACKAGES = ("tensorflow", "keras", "numpy", "ml_dtypes")
HEADINGS = ("environment", "Python", *PACKAGES, "passed", "failed", "skipped", "seconds")


def main(environments: list[str]) -> int:
    """Prints what pytest prints, then the table; returns the exit status."""
    rows = [(environment, *versions(environment), *run(environment)) for environment in environments]
    print(table([HEADINGS, *rows]))
    return int(any(not row[-4] or row[-3] for row in rows))


def versions(environment: str) -> list[str]:
    """Those of Python and of `PACKAGES` in there."""
    code = (
        "import importlib.metadata, json, platform, sys; "
        "print(json.dumps([platform.python_version(), *map(importlib.metadata.version, sys.argv[1:])]))"
    )
    command = [HERE.parents[1] / environment / "bin" / "python", "-c", code, *PACKAGES]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def run(environment: str) -> tuple[int, int, int, int]:
    """How many tests of the core passed, failed and were skipped in there, and the seconds it took."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="halfstep-matrix-") as folder:
        report = pathlib.Path(folder) / "report.xml"
        subprocess.run([HERE / "core.sh", environment, f"--junit-xml={report}"], check=False)
        return *counts(report), round(time.monotonic() - start)


def counts(report: pathlib.Path) -> tuple[int, int, int]:
    """Passed, failed and skipped tests of a JUnit report; a report that is not there is one failure."""
    if not report.exists():
        return 0, 1, 0
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    found = [tuple(int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")) for suite in suites]
    tests, failures, errors, skipped = map(sum, zip(*found, strict=True))
    return tests - failures - errors - skipped, failures + errors, skipped


def table(rows: list[tuple]) -> str:
    """The rows in columns, as wide as they must be."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(str(c).ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
