"""Guards what `make test` runs: what `slow.txt` takes out of it exists, and is no test that has to stay."""

import json
import os
import pathlib
import re
import runpy
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def lines_of(name):
    """What a list in tests/ names, without its comments."""
    return [line for line in (ROOT / "tests" / name).read_text().splitlines() if not line.startswith("#")]


SLOW = [*lines_of("slow.txt"), *lines_of("exhaustive.txt")]
MUTANTS = runpy.run_path(str(ROOT / "tests/mutants/breakages.py"))
BREAKAGES = MUTANTS["BREAKAGES"]
NOTICING = [breakage.test for breakage in BREAKAGES.values()]
# Prints every test with the names of its marks, of one collection.
COLLECT = """
import json, pathlib, pytest, sys

class Seen:
    def pytest_collection_finish(self, session):
        found = {item.nodeid: [mark.name for mark in item.iter_markers()] for item in session.items}
        pathlib.Path(sys.argv[1]).write_text(json.dumps(found))

sys.exit(pytest.main(["--collect-only", "-p", "no:cacheprovider", "-m", ""], plugins=[Seen()]))
"""


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


def test_what_notices_a_breakage_is_not_slow():
    for test in NOTICING:
        assert not [line for line in SLOW if is_of(test, line) or is_of(line, test)]


def test_every_breakage_can_still_be_made():
    assert not [name for name, breakage in BREAKAGES.items() if breakage.broken(ROOT) is None]


def test_a_breakage_of_one_mode_says_why():
    for breakage in BREAKAGES.values():
        assert bool(breakage.only) == bool(breakage.why)
        assert breakage.only in ("", *MUTANTS["MODES"])


def test_no_test_is_marked_slow_but_in_the_list():
    files = (path for path in (ROOT / "tests").rglob("*.py") if path.name not in ("conftest.py", "test_slow.py"))
    assert not [str(path) for path in files if "mark.slow" in path.read_text(encoding="utf-8")]


def test_the_list_names_tests_and_leaves_some_of_each_that_is_promised(tmp_path):
    """Costs a collection of all tests."""
    place = tmp_path / "marks.json"
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, str(place)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    marks = json.loads(place.read_text())
    by_default = [test for test, names in marks.items() if not {"slow", "exhaustive"} & set(names)]
    assert len(set(SLOW)) == len(SLOW)
    assert not [line for line in SLOW if not any(is_of(test, line) for test in marks)]
    assert not [test for test, names in marks.items() if {"slow", "exhaustive"} <= set(names)]
    for name in [*NOTICING, *promised()]:
        assert any(is_of(test, name) for test in by_default), name
    run_by_ci = [test for test, names in marks.items() if "exhaustive" not in names]
    for name in compared():
        assert any(is_of(test, name) for test in run_by_ci), name
