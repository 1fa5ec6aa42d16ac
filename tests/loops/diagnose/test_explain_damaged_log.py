"""Guards that `halfstep explain` names damaged lines of the log, and explains what can be read."""

import planted
import pytest

from halfstep import main
from loops.diagnose.explain.remedies import Kind


@pytest.mark.slow
def test_damaged_lines_of_the_log_are_named(tmp_path, monkeypatch, capsys, tried):
    tried(Kind.ANOTHER_BATCH)
    monkeypatch.chdir(tmp_path)
    planted.nan_batch(tmp_path).run(planted.STEPS["nan_batch"])
    path = tmp_path / "steps.jsonl"
    first, second, *others = path.read_text().splitlines()
    told = second.replace('"loss"', '"loss": "low", "once"')
    path.write_text("\n".join([first, "{", told, *others, "[1]", '{"step": 6, "lo']))
    capsys.readouterr()
    assert main(["explain", str(tmp_path), "--build", "planted:nan_batch"]) == 0
    told = capsys.readouterr().out
    assert "Step 3 was skipped at loss scale" in told
    assert "steps.jsonl: 3 incomplete or foreign lines were skipped, first line 2." in told
    assert "steps.jsonl: line 3 has the text 'low' as its loss, not a number: it counts as unknown." in told
