"""Guards what a run says of itself: its summary first, and else its newest checkpoint, of which no value is read."""

import json

import pytest

import loops
from loops.diagnose.explain.action import Explanations
from loops.loop.state import folder
from loops.record.files import metadata_of

RUN = {"task": "digits", "policy": "float16"}
SAVED = {"identity": {"run": RUN, "replicas": 2, "workers": 1}, "versions": {"tensorflow": "2.18"}}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder, of which the checkpoints of steps 3 and 2 say what is given."""
    saved = {}

    def read(path, *, whole=True):
        assert not whole
        number = int(path.rpartition("-")[2])
        if number not in saved:
            raise folder.Damaged("it is torn")
        return saved[number]

    monkeypatch.setattr(folder, "numbers", lambda place: [3, 2] if place.name == "checkpoints" else [])
    monkeypatch.setattr(folder, "read_facts", read)

    def made(summary=None, **checkpoints):
        saved.update({int(name[1:]): facts for name, facts in checkpoints.items()})
        if summary is not None:
            (tmp_path / "summary.json").write_text(json.dumps(summary))
        return tmp_path

    return made


def test_nothing_is_known_of_an_empty_folder(run):
    assert metadata_of(run()) == ({}, {})


def test_a_summary_says_it_also_beside_checkpoints_of_another_run(run):
    summary = {"task": "text", "digest_depends_on": {"tensorflow": "2.20"}}
    assert metadata_of(run(summary, _3=SAVED)) == (summary, {"tensorflow": "2.20"})


@pytest.mark.parametrize("step", ["_3", "_2"])
def test_else_the_newest_checkpoint_that_can_be_read_says_it(run, step):
    facts, versions = metadata_of(run(**{step: SAVED}))
    assert facts == {**RUN, "replicas": 2, "workers": 1}
    assert versions == {"tensorflow": "2.18"}


def test_what_a_summary_leaves_open_is_of_the_checkpoint(run):
    facts, versions = metadata_of(run({"task": "text"}, _3=SAVED))
    assert (facts["task"], facts["policy"], versions) == ("text", "float16", {"tensorflow": "2.18"})


def test_a_summary_that_cannot_be_read_says_nothing(run):
    (run() / "summary.json").write_text('{"task": ')
    assert metadata_of(run(_2=SAVED)).facts["task"] == "digits"


SHORT, LONG = "Dynamic(initial_scale=2^16)", "Dynamic(initial_scale=65536.0, growth_factor=2.0, growth_interval=2000)"


@pytest.mark.parametrize(
    ("identity", "settings", "strategy"),
    [
        ({"strategy": LONG}, {}, SHORT),
        (
            {},
            {"LossScaler": {"strategy": f"SpikeGuard(strategy={LONG}, factor=20.0)"}},
            f"SpikeGuard(strategy={SHORT})",
        ),
        ({}, {"LossScaler": {"strategy": LONG}, "SGD": {"class": "SGD"}, "Layerwise": {"strategy": LONG}}, SHORT),
        ({}, {"PerLoss": {"a": LONG, "b": "NoScaling()"}}, f"{SHORT}; NoScaling()"),
        ({"parts": {"critic": {"strategy": LONG}, "actor": {"strategy": LONG}}}, {}, SHORT),
        ({"strategy": "<my strategy>"}, {}, "<my strategy>"),
        ({"strategy": "(" * 5000}, {}, "(" * 5000),
        ({"strategy": 7, "parts": [1]}, {"LossScaler": 3, "PerLoss": {"a": 1}}, None),
    ],
)
def test_the_strategy_is_as_one_would_write_it(run, identity, settings, strategy):
    saved = {**SAVED, "identity": {**SAVED["identity"], **identity}, "settings": settings}
    assert metadata_of(run(_3=saved)).facts.get("strategy") == strategy


def test_a_run_of_the_command_has_the_strategy_that_was_asked_for(run):
    identity = {"run": {**RUN, "strategy": "dynamic"}, "strategy": LONG}
    assert metadata_of(run(_3={**SAVED, "identity": identity})).facts["strategy"] == "dynamic"


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
