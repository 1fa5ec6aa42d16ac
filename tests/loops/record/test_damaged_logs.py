"""Guards the readers of a run's folder from a line that holds nonsense: it is passed over as a torn one is."""

import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

import loops
from halfstep import main
from loops.record import read_run
from loops.record.files import metadata_of, replayed_in
from loops.record.log import difference, read_columns, read_log
from loops.record.reading import read_steps
from loops.record.skips import health
from loops.views.watch import LiveRun

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
LINES = {
    "nested": DEEP,
    "nested inside": f'{{"step": 5, "loss": {DEEP}}}',
    "lists": "[" * 100_000,
    "a number of 5000 digits": f'{{"step": 5{"0" * 5000}}}',
    "a step of 100 bits": f'{{"step": {2**100}, "loss": 1.0}}',
    "a step that is none": '{"step": true, "loss": 1.0}',
    "zeros": "\0" * 1000,
}


def log_with(folder, line):
    """A log of ten steps with a line among them."""
    rows = [json.dumps({"step": step, "loss": 1 / step, "applied": True, "loss_scale": 8.0}) for step in range(1, 11)]
    (folder / "steps.jsonl").write_text("\n".join([*rows[:4], line, *rows[4:]]) + "\n")
    return folder / "steps.jsonl"


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_every_reader_passes_a_damaged_line_over(line, tmp_path):
    path = log_with(tmp_path, line)
    found = read_run(tmp_path)
    assert found.step.tolist() == list(range(1, 11))
    assert "incomplete or foreign line" in found.notes[0]
    assert [row["step"] for row in read_log(path)] == list(range(1, 11))
    health(read_columns(path))
    course = LiveRun(tmp_path)
    course.look()
    assert course.step == 10
    before = path.read_bytes()
    resumed = loops.JsonLines(path)
    resumed.load_state({"step": 10, "line": 0})
    assert path.read_bytes() == before
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "report.html")]) == 0
    assert main(["lab", "compare", str(tmp_path), str(tmp_path)]) == 0


@pytest.mark.exhaustive_with("JsonLines-steps.jsonl-0", "Csv-steps.csv-4")
@pytest.mark.parametrize("left", [0, 4])
@pytest.mark.parametrize(("writer", "name"), [(loops.JsonLines, "steps.jsonl"), (loops.Csv, "steps.csv")])
def test_lines_that_the_file_has_lost_are_named_when_a_run_goes_on(writer, name, left, tmp_path):
    def loop():
        variable = tf.Variable(0.0)
        data = tf.data.Dataset.range(100)
        actions = [writer(tmp_path / name, every=2), loops.Checkpoint(tmp_path / "saved", every=5, resume=True)]
        return loops.Loop(lambda x: {"loss": variable.assign_add(1.0)}, data, steps_per_call=1, actions=actions)

    loop().run(9)
    loop().run(11)  # Nothing is lost, and nothing is said: warnings are errors here.
    path = tmp_path / name
    lines = path.read_text().splitlines(keepends=True)
    header = len(lines) - 5
    path.write_text("".join(lines[: header + left]) if left else "")
    with pytest.warns(loops.ResumeWarning, match=rf"its lines end at step {2 * left}, .* up to step 10"):
        loop().run(15)


def test_other_files_of_a_run_may_be_nested_too_deep(tmp_path):
    for name in ("summary.json", "replay.json"):
        (tmp_path / name).write_text(DEEP)
    assert metadata_of(tmp_path) == ({}, {})
    notes = []
    assert replayed_in(tmp_path, notes) == ()
    assert "not the output of halfstep lab replay --json" in notes[0]


def test_a_number_beyond_64_bits_is_infinite(tmp_path):
    path = log_with(tmp_path, f'{{"step": 11, "loss": 1{"0" * 400}}}')
    assert read_run(path).column("loss")[-1] == np.inf


@pytest.mark.parametrize("line", ["²,1", f"{10**30},1", f"5{'0' * 5000},1", '"' + "x" * 200_000, "\0,1"])
def test_damaged_lines_of_a_csv_are_passed_over(line, tmp_path):
    path = pathlib.Path(tmp_path / "steps.csv")
    path.write_text(f"step,loss\n1,1.0\n{line}\n2,2.0\n")
    assert read_run(path).step.tolist() == [1, 2]
    resumed = loops.Csv(path)
    resumed.load_state({"step": 2, "line": 0})
    assert path.read_text().endswith("2,2.0\n")


@pytest.mark.parametrize(
    ("name", "said"),
    [("loss", "loss of step 3 was ")]
    + [(f"critic/{column}", f"{column} of critic at step 3 was ") for column in ("loss", "loss_scale", "applied")],
)
def test_a_repeated_step_is_compared_with_the_log_part_by_part(name, said):
    rows = [{"step": 3, "critic/loss": 1.5, "critic/loss_scale": 8.0, "critic/applied": True, "loss": 1.0}]
    replayed = {key: np.asarray(value) for key, value in rows[0].items() if key != "step"}
    assert difference(rows, {3: replayed}) is None
    found = difference(rows, {3: replayed | {name: np.asarray(not rows[0][name])}})
    assert found.sentence.startswith(said)


@pytest.mark.parametrize("name", ["steps.jsonl", "steps.csv"])
def test_the_first_damaged_line_is_named(name, tmp_path):
    rows = {"steps.jsonl": ['{"step": 1, "loss": 1.0}', '{"step": 2, "lo'], "steps.csv": ["step,loss", "1,1.0", "2"]}
    path = tmp_path / name
    place = len(rows[name])
    path.write_text("\n".join([*rows[name], rows[name][-2]]))
    assert read_columns(path).damage(name, "") == [f"{name}: 1 incomplete or foreign line was skipped, line {place}."]
    path.write_text("\n".join([*rows[name], rows[name][-2], rows[name][-1]]))
    said = f"{name}: 2 incomplete or foreign lines were skipped, first line {place}."
    assert read_run(tmp_path).notes[0] == said


def test_text_in_place_of_a_decision_leaves_that_of_its_step_alone_unknown(tmp_path):
    """A reader that looks for the step to explain still finds the skips of the others."""
    path = tmp_path / "steps.jsonl"
    rows = [{"step": step, "applied": step not in range(8, 14), "loss": 1.0} for step in range(1, 21)]
    rows[2]["applied"] = "yes"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_steps(None, path)
    assert (found.step[~found.known].tolist(), health(found).step, health(found).skips) == ([3], 8, 6)
