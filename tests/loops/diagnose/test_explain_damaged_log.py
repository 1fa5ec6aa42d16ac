"""Guards that `halfstep explain` names a damaged line of the log, and explains what can be read."""

import planted
import pytest

from halfstep import main

DAMAGE = {
    "torn": ('"loss_scale"', "3 incomplete or foreign lines were skipped, first line 2."),
    "text": ('"loss": "low", "once"', "line 2 has the text 'low' as its loss, not a number: it counts as unknown."),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_line_of_the_log_is_named(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    planted.nan_batch(tmp_path).run(planted.STEPS["nan_batch"])
    path = tmp_path / "steps.jsonl"
    lines = path.read_text().splitlines()
    capsys.readouterr()
    assert main(["explain", str(tmp_path), "--build", "planted:nan_batch"]) == 0
    assert "steps.jsonl: " not in capsys.readouterr().out
    word, said = DAMAGE[kind]
    if kind == "torn":
        lines = [lines[0], "{", *lines[1:], "[1]", '{"step": 6, "lo']
    else:
        lines[1] = lines[1].replace('"loss"', word)
    path.write_text("\n".join(lines))
    assert main(["explain", str(tmp_path), "--build", "planted:nan_batch"]) == 0
    told = capsys.readouterr().out
    assert "Step 3 was skipped at loss scale" in told
    assert f"steps.jsonl: {said}" in told
