"""Guards the versions claimed: the lowest are pinned for the oldest environment, where a core of the tests runs."""

import pathlib
import re
import runpy

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from versions import pinned

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
TABLE = runpy.run_path(str(ROOT / "tests/matrix/table.py"))
CORE = [line for line in (ROOT / "tests/matrix/core.txt").read_text().splitlines() if not line.startswith("#")]


def claimed():
    """The packages that are needed to run, by name, with the versions that will do."""
    (needed,) = re.findall(r"^dependencies = \[(.*)\]$", PROJECT, flags=re.MULTILINE)
    found = [Requirement(text) for text in re.findall(r'"(.*?)"', needed)]
    return {requirement.name.replace("_", "-"): requirement.specifier for requirement in found}


def test_the_oldest_environment_has_the_lowest_version_claimed():
    for package, versions in claimed().items():
        (lowest,) = [Version(each.version) for each in versions if each.operator == ">="]
        assert pinned("constraints-oldest.txt")[package] == {lowest}, package


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-oldest.txt"])
def test_what_is_pinned_is_claimed(name):
    for package, versions in claimed().items():
        for version in pinned(name)[package]:
            assert version in versions, package


@pytest.mark.parametrize("package", ["tensorflow", "keras"])
def test_the_newest_version_claimed_is_one_that_is_tested(package):
    (limit,) = [Version(each.version) for each in claimed()[package] if each.operator == "<"]
    newest = max(pinned("constraints.txt")[package])
    assert (limit.major, limit.minor) == (newest.major, newest.minor + 1)


@pytest.mark.parametrize("page", ["README.md", "docs/stability.md"])
def test_pages_name_the_versions_claimed(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    (pythons,) = re.findall(r'^requires-python = "(.*)"$', PROJECT, flags=re.MULTILINE)
    for name, specifiers in {**claimed(), "Python": SpecifierSet(pythons)}.items():
        if name in ("tensorflow", "keras", "Python"):
            bounds = {each.operator: Version(each.version) for each in specifiers}
            low, high = bounds[">="], bounds["<"]
            span = f"{low.major}.{low.minor} to {high.major}.{high.minor - 1}"
            assert re.search(rf"{name}\W+{re.escape(span)}\b", text, re.IGNORECASE), span


def test_the_core_names_tests_that_exist():
    assert len(CORE) > 15
    for line in CORE:
        path, _, name = line.partition("::")
        assert f"def {name or 'test_'}" in (ROOT / path).read_text(encoding="utf-8"), line


def test_counts_are_those_of_the_report(tmp_path):
    report = tmp_path / "report.xml"
    assert TABLE["counts"](report) == (0, 1, 0)
    report.write_text('<testsuites><testsuite tests="9" failures="2" errors="1" skipped="4"/></testsuites>')
    assert TABLE["counts"](report) == (2, 3, 4)


def test_columns_are_as_wide_as_they_must_be():
    assert TABLE["table"]([("a", "bb"), ("ccc", 4)]) == "a    bb\nccc  4"
