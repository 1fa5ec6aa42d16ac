"""Guards the budget of cases: who is over it is red, unless a mark says why, and the dearest are printed."""

import os
import pathlib
import re
import subprocess
import sys

CASES = """
import time
import pytest

def work():
    start = time.process_time()
    while time.process_time() < start + 0.06:
        pass

@pytest.fixture(scope="module")
def shared():
    work()

@pytest.fixture(scope="module")
def shared_by_shared(request):
    request.getfixturevalue("shared")

@pytest.fixture
def own():
    work()

def test_works(): work()
def test_has_a_fixture_of_its_own(own): pass
def test_shares(shared_by_shared): pass
def test_sleeps(): time.sleep(0.2)
@pytest.mark.dear("as it says")
def test_is_dear(): work()
@pytest.mark.dear()
def test_is_dear_without_a_reason(): work()
@pytest.mark.slow
def test_is_slow(): work()
def test_is_wrong():
    work()
    assert 1 == 2
"""
OVER = {"test_works", "test_has_a_fixture_of_its_own", "test_is_dear_without_a_reason"}


def test_what_is_over_the_budget_is_red(tmp_path):
    """In another process, as `make test` runs them: what a case took has to reach the one that prints."""
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "conftest.py").write_text("import budget\n\npytest_plugins = ['budget']\nbudget.LEAST = 0.03\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = dear\n    slow\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "1", "--budget", "0.03", "-rf"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    failed = re.findall(r"^FAILED test_cases.py::(\w+)", done.stdout, flags=re.MULTILINE)
    assert set(failed) == {*OVER, "test_is_wrong"}, done.stdout
    said = re.findall(r"^It passed and took .* of CPU time: expected 0\.03 s or less", done.stdout, flags=re.MULTILINE)
    assert len(said) == len(OVER)  # At the start of a line: where `CI` is set, the summary says them again.
    dearest = re.findall(r"^ +0\.\d  test_cases.py::(\w+)", done.stdout, flags=re.MULTILINE)
    assert set(dearest) == {*OVER, "test_is_dear", "test_is_slow", "test_is_wrong"}
