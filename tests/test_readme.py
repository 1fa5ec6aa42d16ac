"""The README's Python blocks run, in order, as one program."""

import pathlib
import re

from markdown_blocks import python_blocks, run_blocks

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_blocks_run_in_order(tmp_path, monkeypatch):
    assert len(python_blocks(README)) >= 5
    monkeypatch.chdir(tmp_path)
    names = run_blocks(README, tmp_path)
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == 300
    assert names["loop"].counters.attempted == 75


def test_the_two_steps_differ_by_five_lines():
    plain, scaled = re.findall(r"<td>\n\n```python\n(.*?)```", README, flags=re.DOTALL)
    kept = {line.split("#")[0].strip() for line in scaled.splitlines()}
    removed = [line.strip() for line in plain.splitlines() if line.strip() and line.strip() not in kept]
    assert len(re.findall(r"# \d$", scaled, flags=re.MULTILINE)) == 5
    assert len(removed) <= 5, removed
