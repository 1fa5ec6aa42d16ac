"""Guards `docs/compared.md`: each feature said to be here names tests, and all of them exist."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")


def rows(text):
    """The cells of each row of the Markdown tables, without their headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rules = [number for number, line in enumerate(lines) if line.startswith("|---")]
    headings = {number - 1 for number in rules}
    kept = (line for number, line in enumerate(lines) if number not in headings and number not in rules)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in kept]


FEATURES, HELD = TEXT.split("## What holds ours")
HERE = {cells[0]: cells[1] for cells in rows(FEATURES)}
TESTS = {cells[0]: re.findall(r"`(tests/[^`]+)`", cells[1]) for cells in rows(HELD)}


def test_the_tables_are_found():
    assert len(HERE) > 40
    assert {value[0] for value in HERE.values()} <= {"Y", "y", "-"}


def test_each_feature_that_is_here_has_a_row_and_no_other():
    assert set(TESTS) == {feature for feature, value in HERE.items() if value[0] in "Yy"}


@pytest.mark.parametrize("feature", TESTS)
def test_each_named_test_exists(feature):
    assert TESTS[feature]
    for name in TESTS[feature]:
        path, _, function = name.partition("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {function or 'test_'}", source, flags=re.MULTILINE), name
        assert not function or f"def {function}(" in source, name


def test_rows_have_as_many_cells_as_their_headings():
    for table in re.findall(r"(?:^\|.*\n)+", TEXT, flags=re.MULTILINE):
        widths = {line.count("|") for line in table.splitlines()}
        assert len(widths) == 1, table.splitlines()[0]
