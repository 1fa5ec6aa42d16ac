"""What `docs/` shows is true: its Python blocks run, in order, as one program."""

import inspect
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest
from markdown_blocks import python_blocks, run_blocks, text_blocks
from processes import start
from worker_cases import configuration, free_ports

import halfstep as cli
import loops
import scaler
from loops.replay.tune import GRIDS

TESTS = pathlib.Path(__file__).parent
DOCS = TESTS.parent / "docs"
STRATEGIES = (DOCS / "strategies.md").read_text(encoding="utf-8")


def test_every_page_with_python_is_run_by_a_test():
    """Or compared with another that is, as the start page."""
    sources = [path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")]
    running = "\n".join(source for source in sources if "blocks(" in source)
    pages = [page for page in DOCS.rglob("*.md") if "_build" not in page.parts]
    named = [page.name for page in pages if python_blocks(page.read_text(encoding="utf-8"))]
    assert len(named) > 20
    assert [name for name in named if not re.search(rf'["/]{re.escape(name)}"', running)] == []


SLOW = [
    *("accumulation.md", "census.md", "composed_step.md", "data_sources.md", "formats.md", "lint.md", "observe.md"),
    *("own_action.md", "resume.md", "train_step.md"),
]
CONCEPTS = ["concepts/formats.md", "concepts/masters.md", "concepts/scaling.md", "concepts/skips.md"]


@pytest.fixture
def run_page(tmp_path, monkeypatch, capsys, as_graphs):
    """Runs a page as one program: the names that it made, what it printed, and what it shows as printed."""

    def run(page):
        monkeypatch.chdir(tmp_path)
        text = (DOCS / page).read_text(encoding="utf-8")
        names = run_blocks(text, tmp_path)
        return names, capsys.readouterr().out, text_blocks(text)

    return run


@pytest.mark.dear("a page is one program, with all that it shows")
@pytest.mark.slow_with(*SLOW)
@pytest.mark.exhaustive_with("watch.md")
@pytest.mark.parametrize("page", ["presets.md", "diagnosis.md", *CONCEPTS, *SLOW, "watch.md"])
def test_a_page_runs_and_prints_what_it_shows(run_page, page):
    _, printed, shown = run_page(page)
    # The last block of this page is what the commands print: tests/loops/diagnose/test_documented.py.
    assert printed == "".join(shown[:-1] if page == "diagnosis.md" else shown)


@pytest.mark.slow
def test_the_strategy_that_is_written_on_the_way_works(run_page):
    assert len(python_blocks(STRATEGIES)) >= 5
    names, _, (shown,) = run_page("strategies.md")
    assert names["complaint"].split() == shown.split()
    assert names["loss_scaler"].loss_scale == 2.0**15


def test_every_strategy_is_in_the_table():
    named = set(re.findall(r"`(\w+)\(", STRATEGIES.split("## One of your own")[0]))
    kinds = {name for name in scaler.__all__ if hasattr(getattr(scaler, name), "update")} - {"LossScaler", "Strategy"}
    assert kinds <= named | {"LossScaleOptimizer"}, kinds - named


@pytest.mark.slow
def test_the_layerwise_steps_work(run_page):
    names, _, _ = run_page("layerwise.md")
    assert names["loss_scaler"].counters.skipped == 0
    assert "also goes to layer 'block'" in names["complaint"]


@pytest.mark.slow
def test_the_update_modes_do_what_is_said_of_them(run_page):
    assert run_page("update_modes.md")[0]["swallowed"] > 0.5


@pytest.mark.slow
def test_the_loops_run_as_shown(run_page):
    names, printed, (shown,) = run_page("loops.md")
    assert printed.startswith(shown)
    assert names["evaluate"].results["accuracy"] > 0.6  # Half would be guessing.
    assert len(pathlib.Path("run/steps.csv").read_text().splitlines()) == 31
    assert names["skips"] == [0, 0, 0]


def test_every_action_is_in_the_table():
    actions = (DOCS / "loops.md").read_text(encoding="utf-8").split("## Actions")[1].split("```python")[0]
    classes = {name: getattr(loops, name) for name in loops.__all__ if inspect.isclass(getattr(loops, name))}
    public = {
        name
        for name, one in classes.items()
        if inspect.isfunction(one.__call__) and "visit" in inspect.signature(one.__call__).parameters
    }
    assert len(public) > 10
    assert {name for name in public if f"`{name}(" not in actions} == set()


def run_program(place, variables):
    """The program in a folder, in a process that has not used TensorFlow yet; what it prints is left there."""
    os.chdir(place)
    os.environ.update(variables, CUDA_VISIBLE_DEVICES="")
    with open("printed", "w") as printed, open("errors", "w") as errors:
        os.dup2(printed.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    runpy.run_path("program.py", run_name="__main__")


@pytest.mark.slow
def test_replicas_and_workers_are_as_shown(tmp_path):
    """Two programs: one on two devices, one as two workers."""
    blocks = python_blocks((DOCS / "distribution.md").read_text(encoding="utf-8"))
    ports = free_ports(2)
    places = {"replicas": {}, **{f"worker {index}": {"TF_CONFIG": configuration(ports, index)} for index in (0, 1)}}
    processes = {}
    for name, variables in places.items():
        # Folders of their own, as on two machines.
        (tmp_path / name).mkdir()
        (tmp_path / name / "program.py").write_text(blocks[name != "replicas"], encoding="utf-8")
        processes[name] = start(run_program, tmp_path / name, variables)
    for name, process in processes.items():
        process.join(240)
        assert process.exitcode == 0, (tmp_path / name / "errors").read_text()[-2000:]
        printed = (tmp_path / name / "printed").read_text()
        assert printed.endswith("Counters(data=40, attempted=40, applied=40, known=True)\n")
        assert name == "replicas" or printed.split()[0] == name.split()[1]
    saved = {str(file.relative_to(tmp_path)) for file in tmp_path.glob("*/run/**/ckpt-40.index")}
    assert saved == {
        "replicas/run/checkpoints/ckpt-40.index",
        "worker 0/run/checkpoints/ckpt-40.index",
        "worker 1/run/checkpoints/worker-1/ckpt-40.index",
    }
    assert [file.parts[-3] for file in tmp_path.glob("*/run/steps.jsonl")] == ["worker 0"]


@pytest.mark.slow
def test_the_page_for_keras_does_what_it_says(run_page):
    names, printed, _ = run_page("keras.md")
    assert pathlib.Path("model.keras").exists()
    assert names["loaded"].optimizer.loss_scaler.counters.attempted == 8  # Those since the other strategy.
    assert "The step was skipped because the loss itself was not finite" in printed
    assert "Constant(loss_scale=64.0)" in printed


@pytest.mark.slow
def test_the_report_is_made_as_shown(run_page, tmp_path):
    """Also by the commands: those that the page names take the runs of its program."""
    _, printed, (shown,) = run_page("report.md")
    assert printed == shown
    page = (DOCS / "report.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^```sh\nhalfstep (.*?)\n```", page, flags=re.MULTILINE | re.DOTALL)
    assert cli.main(command.split()) == 0
    assert command in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert cli.main(["lab", "compare", "half", "single"]) == 0
    assert {path.name for path in tmp_path.glob("*.*g")} == {
        *("exponents.svg", "headroom.png", "histogram.png", "loss.png", "loss_scale.png", "of_arrays.png")
    }


@pytest.mark.slow
def test_the_trace_is_read_as_shown(run_page):
    names, printed, _ = run_page("trace.md")
    first, second, *_ = printed.splitlines()
    assert first == "1 OVERFLOW 16777216.0 critical: 0.0 to 8388608.0"
    assert second.startswith("Interval(low=0.0")
    assert names["counts"].sum() == 16


@pytest.mark.slow
def test_the_forecast_is_asked_as_shown(run_page):
    run_page("forecast.md")
    assert pathlib.Path("run/trace.arrow").exists()


@pytest.mark.slow
def test_the_replay_runs_as_shown(run_page):
    names, printed, _ = run_page("replay.md")
    dynamic, _, _, _, static = names["found"].strategies
    assert dynamic.scales[0] == 2.0**15
    assert (static.skips, static.at_floor) == (100, None)
    assert "\nHeadroom() " in printed


@pytest.mark.slow
def test_a_scale_is_found_as_shown(run_page, monkeypatch):
    monkeypatch.setitem(GRIDS, "static", {"": ["2**4", "2**14"]})  # Each is compiled.
    names, printed, _ = run_page("tune.md")
    assert names["found"].start < names["found"].critical
    assert "overflow above" in printed
    assert float(printed.splitlines()[-1]) > 0  # The static scale of the recorded run.


DOCTOR = """
import sys
from halfstep import command
from loops.diagnose.doctor import diagnosis
diagnosis.SECONDS = 0.02
sys.exit(command.main(sys.argv[1:]))
"""


@pytest.mark.exhaustive
def test_the_doctor_prints_what_its_page_shows(tmp_path):
    """But for times and what follows from them, which no two runs share.

    In a process of its own: with oneDNN a float16 product with a bias takes 400 times as long on some processors.
    """
    page = (DOCS / "doctor.md").read_text(encoding="utf-8")
    (program,) = python_blocks(page)
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    command = re.findall(r"^halfstep (doctor .*?)(?: *#.*)$", page, flags=re.MULTILINE)[0]
    done = subprocess.run(
        [sys.executable, "-c", DOCTOR, *command.split()],
        cwd=tmp_path,
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0", "PYTHONPATH": str(DOCS.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    *_, shown = text_blocks(page)
    assert _without_times(done.stdout) == _without_times(shown)
    assert (tmp_path / "memory.svg").exists()


def _without_times(text):
    """The lines of a diagnosis before its advice, with no figure in those that are above the memory."""
    times, _, rest = text.partition("\nmemory")
    names = [re.sub(r"[\d.]+|\b(to|faster|slower|the same)\b", "", line).split() for line in times.splitlines()]
    return names, rest.partition("\n\nwhat to change")[0].partition("\n\nNothing")[0]
