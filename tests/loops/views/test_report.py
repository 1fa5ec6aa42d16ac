"""Guards the report of a run: one file that opens offline, with words and numbers for each figure, of any run."""

import base64
import json
import re

import command_cases
import numpy as np
import pytest
import tensorflow as tf
from page_cases import Page
from recorded_cases import NAMES, write_run

import loops
import scaler
from loops.views.chart import ALL_ZERO, INFINITE, NOT_A_NUMBER

FETCHED = re.compile(r"(?:src|href|url|import|fetch|XMLHttpRequest)\s*[=(]|//[a-z]+\.", re.IGNORECASE)


def report(capsys, *arguments):
    return command_cases.run(capsys, "report", *arguments)


def reported(tmp_path, *runs):
    """The page of these runs."""
    loops.observe.report(list(runs), tmp_path / "report.html")
    return (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run") / "mine")


@pytest.fixture(scope="module")
def text(folder):
    return reported(folder, folder)


def test_it_opens_offline(text):
    page = Page(text)
    # The name of SVG looks like an address, and is none that is fetched.
    assert not re.search(r"https?:", text.replace("http://www.w3.org/2000/svg", ""))
    assert not [one for one in page.elements if {"src", "href"} & set(one)]
    assert not [one for one in page.elements if one["tag"] in ("link", "img", "iframe")]
    assert "default-src 'none'" in text
    script = page.all("script")[-1]["text"]
    assert not FETCHED.search(script.replace("http://www.w3.org/2000/svg", ""))


def test_each_figure_has_words_and_numbers(text):
    page = Page(text)
    figures = page.all("figure")
    assert [one["text"] for one in page.all("h3")][:4] == [
        "Loss", "Loss scale and skips", "Headroom, in octaves", "Exponents by tensor and step",
    ]  # fmt: skip
    pictures = [one for one in page.elements if one.get("role") == "img"]
    assert len(pictures) == len(figures) == 4
    assert all(len(one["aria-label"]) > 30 for one in pictures)
    assert len([one for one in page.all("details") if "figure" in one["inside"]]) == 4
    assert all("details" in one["inside"] for one in page.all("table") if "figure" in one["inside"])
    assert "2 steps were skipped: 2 by unknown" in pictures[1]["aria-label"]
    # How to have the step say why is told once.
    assert text.count("have the step return <code>outcome.cause</code> as <code>cause</code>, and") == 1


def test_overflows_that_were_retried_are_counted(tmp_path, text):
    folder = write_run(tmp_path / "retried", trace=False)
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    lines[2]["retries"], lines[4]["retries"] = 3, 1
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "4 overflows were retried at a lower scale" in reported(tmp_path, folder)
    assert "retried" not in text


def test_one_skip_was(tmp_path):
    write_run(tmp_path / "one", skips=(3,), trace=False)
    assert "1 step was skipped: 1 by" in reported(tmp_path, tmp_path / "one")


def test_the_map_holds_what_was_measured(text):
    data = json.loads(Page(text).all("script")[0]["text"])
    cells = np.frombuffer(base64.b64decode(data["cells"]), np.uint8).reshape(len(data["tensors"]), -1)
    assert [tensor[:2] for tensor in data["tensors"]] == [list(name.split("/", 1)) for name in NAMES]
    assert cells.shape == (3, 60)
    assert (cells[0].astype(int) - data["first"] + data["lowest"] == 1).all()
    assert np.flatnonzero(cells[1] == INFINITE).tolist() == [2, 3]
    bars = np.frombuffer(base64.b64decode(data["bars"]), np.uint8).reshape(len(data["frames"]), 3, -1)
    shares = np.where(bars, 2.0 ** ((bars - 255.0) / 254 * data["octaves"]), 0.0)
    np.testing.assert_allclose(shares.sum(axis=2), 1.0, atol=0.05)
    assert data["frames"][-1] == 60
    bins = data["bins"]
    np.testing.assert_allclose(shares[-1, 0, [bins - 1, bins]], [0.7, 0.1], atol=0.03)


def test_a_map_tells_zero_nan_and_infinity_apart(tmp_path):
    values = {1: 0.0, 2: np.nan, 3: np.inf, 4: 1.0}
    run = write_run(tmp_path, steps=4, skips=(), amax=lambda step, place: values[step], log=False)
    data = json.loads(Page(reported(tmp_path, run)).all("script")[0]["text"])
    assert list(base64.b64decode(data["cells"]))[:4] == [
        ALL_ZERO,
        NOT_A_NUMBER,
        INFINITE,
        data["first"] - data["lowest"],
    ]


def test_the_names_of_layers_are_no_markup(tmp_path):
    bad = 'activations/</script><script>alert("1")</script>'
    run = write_run(tmp_path / "<b>run</b>&", names=(bad,), steps=5)
    text = reported(tmp_path, run, run)
    assert "<script>alert" not in text
    assert "<b>run" not in text
    page = Page(text)
    assert json.loads(page.all("script")[0]["text"])["tensors"][0][1] == bad.partition("/")[2]
    assert len(page.all("script")) == 3


@pytest.mark.parametrize("missing", ["trace", "log"])
def test_half_of_a_run_is_a_report(tmp_path, capsys, missing):
    run = write_run(tmp_path / "run", **{missing: False})
    status, printed, _ = report(capsys, run, "--out", tmp_path / "report.html")
    assert status == 0
    assert printed.startswith(f"wrote {tmp_path}/report.html, ")
    text = (tmp_path / "report.html").read_text()
    assert len(Page(text).all("figure")) == (2 if missing == "trace" else 4)
    assert ("hs.Trace(" in text) == (missing == "trace")


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (["run"], "run/report.html"),
        (["run/steps.jsonl"], "run/report.html"),
        (["run", "run"], "report.html"),
        (["run", "--out", "other.html"], "other.html"),
    ],
)
def test_the_report_of_a_run_is_in_its_folder(tmp_path, capsys, monkeypatch, given, written):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", steps=3, skips=())
    before = set(tmp_path.rglob("*"))
    assert report(capsys, *given)[1].startswith(f"wrote {written}, ")
    assert set(tmp_path.rglob("*")) - before == {tmp_path / written}


@pytest.mark.parametrize(
    "made",
    [
        {"steps": 1, "skips": ()},
        {"steps": 1, "skips": (1,)},
        {"steps": 12, "skips": range(1, 13), "loss": lambda step: np.nan},
        {"dtype": "bfloat16", "skips": (), "scale": lambda step: 1.0},
        {"names": (), "steps": 5},
    ],
)
def test_any_run_is_a_report(tmp_path, made):
    run = write_run(tmp_path, **made)
    text = reported(tmp_path, run)
    assert Page(text).all("h1")
    for wrong in ("nan", "inf"):
        assert not re.search(rf'[d=" MHVL%]{wrong}\b', " ".join(re.findall(r'(?: d|style)="[^"]*"', text)))


def test_runs_stand_side_by_side(tmp_path, capsys):
    first = write_run(tmp_path / "first")
    other = write_run(tmp_path / "other", skips=(), names=("activations/conv",), scale=lambda step: 2.0**10)
    status, _, _ = report(capsys, first, other, "--out", tmp_path / "report.html")
    assert status == 0
    text = (tmp_path / "report.html").read_text()
    headings = [one["text"] for one in Page(text).all("h2")]
    assert headings == ["Side by side", "first", "other", "How it was made"]
    assert f"halfstep report {first} {other} --out {tmp_path}/report.html" in text


def test_a_long_run_with_many_tensors_fits(tmp_path):
    names = tuple(f"activations/block_{place}/dense" for place in range(1600))
    run = write_run(tmp_path / "run", names=names, steps=20, log=False)
    size = loops.observe.report([run, run, run], tmp_path / "report.html")
    assert size == (tmp_path / "report.html").stat().st_size <= 1_000_000


@pytest.mark.exhaustive
@pytest.mark.slow
def test_many_runs_fit(tmp_path):
    names = tuple(f"activations/block_{place}/dense" for place in range(100))
    runs = [write_run(tmp_path / "run", names=names, steps=20)] * 40
    assert loops.observe.report(runs, tmp_path / "report.html") <= 1_000_000
    text = (tmp_path / "report.html").read_text()
    (shown,) = re.findall(r"Only the first (\d+) runs have figures of their own", text)
    assert len([one for one in Page(text).all("canvas")]) == int(shown) > 4


def test_every_skip_of_a_long_run_is_seen(tmp_path):
    """The marks of skips that are far apart stay apart, and each of the rest lies in a marked column."""
    steps = 50_000
    applied = np.ones(steps)
    applied[[0, 25_000, 25_001, 49_999]] = 0
    run = {"applied": applied, "loss": np.linspace(1, 2, steps), "loss_scale": np.full(steps, 8.0)}
    size = loops.observe.report([run], tmp_path / "report.html")
    lane = re.search(r'<svg class="lane".*?d="([^"]*)"', (tmp_path / "report.html").read_text()).group(1)
    assert re.findall(r"M([\d.]+)", lane) == ["0", "500", "1000"]
    assert size < 100_000


def test_a_value_between_gaps_is_seen(tmp_path):
    loops.observe.report([{"loss": [1.0, np.nan, 3.0, np.nan, 2.0, 4.0]}], tmp_path / "report.html")
    path = re.search(r'<path class="line blue" d="([^"]*)"/>\n</svg>', (tmp_path / "report.html").read_text()).group(1)
    assert [part.count("h") for part in path.split("M")[1:]] == [1, 1, 0]


def test_critical_scales_beyond_the_axis_are_not_drawn_on_its_edge(tmp_path):
    run = write_run(tmp_path / "run", skips=(3, 4))
    text = reported(tmp_path, run)
    grey = re.search(r'aria-label="Loss scale over.*?<path class="line faint" d="([^"]*)"', text, re.DOTALL).group(1)
    assert grey.count("M") + grey.count("L") == 2
    assert "Where it is missing it is not known, or beyond 2^12 times the largest loss scale." in text


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["missing"], 2, "no such folder"),
        (["empty"], 1, "no step is recorded there"),
        (["run", "--out", "."], 2, "a folder: expected the file to write"),
        (["run", "--out", "run/steps.jsonl/report.html"], 1, "cannot be written"),
        (["run", "--build", "x:y"], 2, "--build is for --explain"),
        ([], 2, "RUN"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, tmp_path, monkeypatch, arguments, status, said):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", steps=3, skips=())
    (tmp_path / "empty").mkdir()
    found, printed, errors = report(capsys, *arguments)
    assert found == status
    assert said in errors
    assert "Traceback" not in errors
    assert printed == ""


def test_strategies_that_were_replayed_are_a_table(tmp_path):
    run = write_run(tmp_path / "run", steps=5)
    row = {"strategy": "dynamic:<b>", "skips": 12, "skip_rate": 0.25, "mean_log2_scale": 14.5, "final_scale": 512.0}
    (run / "replay.json").write_text(json.dumps({"steps": 5, "strategies": [{**row, "flushed": None}]}))
    text = reported(tmp_path, run)
    assert "Other strategies, replayed" in text
    assert "dynamic:&lt;b&gt;</th><td>12</td><td>25%</td><td>14.5</td><td>2^9</td><td>–</td>" in text


def test_a_replayed_figure_has_its_interval(tmp_path):
    run = write_run(tmp_path / "run", steps=5)
    known = {"skips": [10, 13], "skip_rate": [0.2, 0.5], "mean_log2_scale": 3, "final_scale": [1], "flushed": None}
    rows = [{"strategy": "a", "skips": 12, "skip_rate": 0.25, "may_differ_at": 3, "intervals": known}]
    rows.append({"strategy": "b", "skips": 12, "intervals": "none"})
    (run / "replay.json").write_text(json.dumps({"strategies": rows}))
    text = reported(tmp_path, run)
    assert "<td>12 (10 to 13)</td><td>25% (20% to 50%)</td><td>–</td><td>–</td><td>–</td><td>3</td>" in text
    assert "b</th><td>12</td><td>–</td><td>–</td><td>–</td><td>–</td><td>–</td>" in text


@pytest.mark.parametrize("text", ["[]", "{", '{"strategies": [1]}', '{"strategies": {"strategy": 1}}'])
def test_what_is_no_replay_is_a_note(tmp_path, text):
    run = write_run(tmp_path / "run", steps=5)
    (run / "replay.json").write_text(text)
    assert "replay.json is not the output of halfstep lab replay --json" in reported(tmp_path, run)


def test_figures_that_no_run_has_are_no_rows(tmp_path):
    """The headroom of one run keeps the row; nothing has a score or a strategy."""
    runs = [write_run(tmp_path / name, trace=name == "traced") for name in ("traced", "plain")]
    (table,) = re.findall(r"<table>.*?</table>", reported(tmp_path, *runs), re.DOTALL)[:1]
    heads = re.findall(r'<th scope="row">(.*?)</th>', table)
    assert {"strategy", "score"}.isdisjoint(heads)
    assert heads[-2:] == ["headroom", "final loss"]
    text = reported(tmp_path, runs[1])
    assert "headroom</th>" not in text
    assert "Headroom: octaves" not in text


def test_scales_are_powers_of_two_everywhere(tmp_path):
    """In sentences, tables and what a map says; the labels of an axis raise the exponent."""
    run = write_run(tmp_path / "run", scale=lambda step: 2.0 ** (12 + step // 30), skips=(3, 40))
    text = reported(tmp_path, run)
    assert "the loss scale ended at 2^14" in text
    assert "from 2^12 to 2^14" in text
    assert "<td>unknown</td><td>2^12</td>" in text.replace("</th>", "</td>")
    assert "final scale</th><td>2^14</td>" in text
    assert not re.search("2[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]|4096|4,096|1.638e", text)
    assert '"2^" + value' in Page(text).all("script")[-1]["text"]


def test_the_strategy_of_a_program_is_that_of_its_checkpoint(tmp_path):
    data = tf.data.Dataset.range(8)
    strategies = {"guarded": scaler.SpikeGuard(scaler.Dynamic(2.0**12, growth_interval=64)), "plain": scaler.Dynamic()}
    for name, strategy in strategies.items():
        folder, loss_scaler = tmp_path / name, scaler.LossScaler(strategy)

        def step(number):
            return {"loss": number}

        step.loss_scaler = loss_scaler
        saves = loops.Checkpoint(folder / "checkpoints", every=8)
        loops.Loop(step, data, actions=[loops.JsonLines(folder / "steps.jsonl"), saves], steps_per_call=1).run(8)
    text = reported(tmp_path, *(tmp_path / name for name in strategies))
    guarded = "SpikeGuard(strategy=Dynamic(initial_scale=2^12, growth_interval=64))"
    assert f"strategy</th><td>{guarded}</td><td>Dynamic()</td>" in text


@pytest.mark.parametrize(
    ("skips", "lost", "cause", "said"),
    [
        ((3, 7, 9), (7, 9), "LOSS", "caused 2 of the 3 skips, not the loss scale: the loss itself was not finite"),
        ((7, 9), (7, 9), None, "caused all 2 skips, not the loss scale: the loss itself was not finite, first at"),
        ((7,), (7,), "LOSS", "caused the only skip, not the loss scale: the loss itself was not finite, at step 7."),
        ((3, 7), (), "OVERFLOW", ""),
    ],
)
def test_bad_data_is_told_from_overflows(tmp_path, skips, lost, cause, said):
    rows = [
        {"step": step, "loss": None if step in lost else 1.0, "loss_scale": 8.0, "applied": step not in skips}
        | ({"cause": cause if step in lost else "OVERFLOW"} if step in skips and cause else {})
        for step in range(1, 11)
    ]
    (tmp_path / "steps.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (sentence,) = re.findall(r'<p class="result">(.*?)</p>', reported(tmp_path, tmp_path))
    assert said in sentence
    assert sentence.count("The data or the forward pass") == bool(said)


def test_a_run_with_trouble_names_the_step_to_explain(tmp_path):
    run = write_run(tmp_path / "run", skips=(*range(41, 49), 60))
    assert "halfstep explain" in reported(tmp_path, run)


def test_a_run_that_cannot_be_explained_says_why(tmp_path, capsys):
    run = write_run(tmp_path / "run", skips=(*range(41, 49), 60))
    status, _, _ = report(capsys, run, "--explain", "--out", tmp_path / "report.html")
    assert status == 0
    assert "This run cannot be explained" in (tmp_path / "report.html").read_text()


def test_no_run_is_refused(tmp_path):
    with pytest.raises(scaler.InvalidArgument, match="no run"):
        loops.observe.report([], tmp_path / "report.html")
