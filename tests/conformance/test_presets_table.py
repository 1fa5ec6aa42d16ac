"""Guards that the table of presets is complete, and that each row names a source."""

import pathlib

from scaler import presets

TABLE = pathlib.Path(__file__).parents[2] / "docs" / "presets.md"


def test_each_preset_has_a_row_with_a_source_and_each_policy_a_mention():
    text = TABLE.read_text()
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    rows = {line[0].split("`")[1]: line for line in lines if len(line) == 9}
    for name in presets.__all__:
        if name.endswith("_stuck"):
            assert f"`{name}(" in text
        else:
            source = rows[name][-1]
            assert any(mark in source for mark in (".py`", "arXiv", "the same file")), source
