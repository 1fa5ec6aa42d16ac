"""Guards the file of explanations: a resumed run keeps those of its steps, and a damaged file harms nothing."""

import json

import pytest

import loops
from loops.diagnose.explain.action import Explanations


def steps_in(path):
    return [one["step"] for one in json.loads(path.read_text())["explanations"]]


def test_a_run_that_goes_on_keeps_those_of_its_steps_and_a_new_one_none(tmp_path):
    path = tmp_path / "explanations.json"
    first = Explanations(path)
    first.go_on(0)
    assert not path.exists()
    for step in (2, 5):
        first.add({"step": step, "sentence": "it was skipped", "octaves_over": float("nan")})
    assert steps_in(path) == [2, 5]
    resumed = Explanations(path)
    resumed.go_on(4)
    resumed.add({"step": 5})
    assert steps_in(path) == [2, 5]
    Explanations(path).go_on(0)
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"explanations": 3}', '{"explanations": [7, {"step": "x"}]}', "\xff"])
def test_a_damaged_file_is_replaced(tmp_path, text):
    path = tmp_path / "explanations.json"
    path.write_text(text, encoding="latin-1")
    found = Explanations(path)
    found.go_on(9)
    found.add({"step": 10})
    assert steps_in(path) == [10]


def test_it_stands_next_to_the_log(tmp_path):
    assert Explanations.beside([print]) is None
    assert Explanations.beside([print, loops.Csv(tmp_path / "run" / "steps.csv")])._path.parent == tmp_path / "run"
