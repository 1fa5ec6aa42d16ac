"""Guards what `make test` runs: what notices a breakage or stands for a promise is not marked slow, not all of it."""

import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def lines_of(name):
    """What a list in tests/ names, without its comments."""
    return [line for line in (ROOT / "tests" / name).read_text().splitlines() if not line.startswith("#")]


MUTANTS = runpy.run_path(str(ROOT / "tests/mutants/breakages.py"))
BREAKAGES = MUTANTS["BREAKAGES"]
NOTICING = [breakage.test for breakage in BREAKAGES.values()]


def is_of(test, name):
    """Whether `name` is the test, all its parameters, or its file."""
    return name in (test, test.partition("[")[0], test.partition("::")[0])


def promised():
    """What the table of the promise and the core name: tests, or whole files."""
    table = (ROOT / "docs/promise.md").read_text().partition("# The promise")[2].partition("\n\n`tests/")[0]
    files = re.findall(r"`[\w/]*?(\w+\.py)`", table)
    return [
        *lines_of("matrix/core.txt"),
        *(str(path.relative_to(ROOT)) for name in files for path in ROOT.glob(f"tests/**/*{name}")),
    ]


def compared():
    """What docs/compared.md names."""
    return re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", (ROOT / "docs/compared.md").read_text())


def test_every_breakage_can_still_be_made():
    assert not [name for name, breakage in BREAKAGES.items() if breakage.broken(ROOT) is None]


def test_a_breakage_of_one_mode_says_why():
    for breakage in BREAKAGES.values():
        assert bool(breakage.only) == bool(breakage.why)
        assert breakage.only in ("", *MUTANTS["MODES"])


@pytest.mark.slow
def test_marks_name_parameters_that_are_there_and_leave_some_of_each_test_that_is_promised(tiers, request):
    """Costs a collection of all tests, where they are not all collected in any case."""
    if tiers is None:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", "-k", request.node.name, "tests"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:]
        return
    found, named = tiers
    assert not [name for name in named if name not in found]
    by_default = [test for test, marks in found.items() if not {"slow", "exhaustive"} & marks]
    for name in [*NOTICING, *promised()]:
        assert any(is_of(test, name) for test in by_default), name
    run_by_ci = [test for test, marks in found.items() if "exhaustive" not in marks]
    for name in compared():
        assert any(is_of(test, name) for test in run_by_ci), name
