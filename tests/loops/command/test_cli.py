"""Guards the command line: what it prints and writes, and one line with a status for everything that cannot be."""

import importlib
import math
import re
import runpy
import shutil
import sys
import warnings

import keras
import pytest
from command_cases import run, strict

import loops
from halfstep import command
from halfstep.command import main
from loops.diagnose.doctor import layer_times
from loops.run.train import POLICIES


@pytest.mark.usefixtures("small_digits")
def test_train_writes_what_it_says(capsys, tmp_path):
    out = tmp_path / "run"
    status, printed, progress = run(
        capsys, "train", "digits", "--policy", "float32", "--strategy", "none", "--steps", 3, "--seed", 5, "--out", out
    )
    assert status == 0
    summary = strict((out / "summary.json").read_text())
    assert (summary["policy"], summary["strategy"], summary["steps"], summary["seed"]) == ("float32", "none", 3, 5)
    assert summary["weights_digest"] in printed
    assert f"wrote {out}/summary.json" in printed
    assert "applied 3  skipped 0  loss scale 1" in printed
    assert "digits  3/3" in progress
    assert (out / "steps.jsonl").read_text().count("\n") == 3


@pytest.mark.slow
@pytest.mark.usefixtures("small_digits")
def test_train_goes_on_with_a_change_that_is_named(capsys, tmp_path):
    saved = ["train", "digits", "--checkpoint-every", 2, "--out", tmp_path]
    assert run(capsys, *saved, "--steps", 2)[0] == 0
    other = [*saved, "--steps", 4, "--resume", "--strategy", "headroom"]
    status, _, said = run(capsys, *other)
    assert status == 1
    assert "on the command line --changed loss_scaler." in said
    status, _, progress = run(capsys, *other, "--changed", "loss_scaler")
    assert status == 0
    assert "digits  resumed from step 2; strategy was" in progress


@pytest.mark.parametrize(
    ("typed", "usage", "said"),
    [
        ("repport", "usage: halfstep [-h]", "choose from '?train.+ Did you mean 'report'\\?$"),
        ("lab cur run", "usage: halfstep lab [-h]", " Did you mean 'cure'\\?$"),
        ("train digits --stpes 3", "usage: halfstep train [-h]", "arguments: --stpes 3. Did you mean '--steps'\\?$"),
        ("lab cure run --step 3 --jsno", "usage: halfstep lab cure [-h]", "--jsno. Did you mean '--json'\\?$"),
        ("zzz", "usage: halfstep [-h]", "invalid choice: 'zzz' [^?]+$"),
        ("train digits more", "usage: halfstep train [-h]", "unrecognized arguments: more$"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_nearest(capsys, typed, usage, said):
    with pytest.raises(SystemExit) as exited:
        main(typed.split())
    assert exited.value.code == 2
    printed, errors = capsys.readouterr()
    assert (printed, errors.startswith(usage)) == ("", True)
    assert re.search(said, errors.strip())


def test_a_warning_is_printed_without_the_line_that_gives_it(capsys, monkeypatch):
    def warn(options):
        print(warnings.formatwarning("float16 is slow", UserWarning, "somewhere.py", 3, "code = 1"), end="")

    monkeypatch.setattr(command, "_run", warn)
    before = warnings.formatwarning
    assert main(["doctor"]) is None
    assert capsys.readouterr().out == "halfstep: UserWarning: float16 is slow\n"
    assert warnings.formatwarning is before


@pytest.mark.parametrize(
    ("command", "found", "said"),
    [
        ("train digits", {"final_loss": math.nan, "accuracy": 0.1}, {"final_loss": None, "accuracy": 0.1}),
        ("lab study", {"setups": [{"final_loss": math.nan}]}, {"setups": [{"final_loss": None}]}),
    ],
)
def test_json_alone_is_printed_also_with_nan(capsys, tmp_path, monkeypatch, command, found, said):
    monkeypatch.setattr(sys.modules["loops.run.train"], "train", lambda *_, **__: found)
    monkeypatch.setattr("loops.study.compare.run_study", lambda *_, **__: found)
    monkeypatch.setattr("loops.study.page.report_study", lambda out: [])
    status, printed, _ = run(capsys, *command.split(), "--out", tmp_path, "--json")
    assert (status, strict(printed)) == (0, said)


def times(base=(1.0, 1.2, 1.5, 1.4), **others):
    """The times of two layers: float32's, and those of other formats as multiples of it, by default ten times."""
    rows = {"float32": base, **{name: others.get(name, (10.0,) * len(base)) for name in ("float16", "bfloat16")}}
    return {
        (layer, name): {one: size * time for one, time in zip(layer_times.SETTINGS, row, strict=False) if time}
        for layer, size in (("Dense", 0.5), ("Conv2D", 2.0))
        for name, row in rows.items()
    }


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(layer_times, "measure", lambda: times(float16=(4.0, 2.0, 1.9, None)))


def test_doctor_shows_times_and_has_a_verdict(capsys, measured):
    status, printed, _ = run(capsys, "doctor", "--json")
    found = strict(printed)
    assert status == 0
    assert set(found) == {"versions", "devices", "layers", "verdict", "setting", "gpus", "namesakes"}
    assert set(found["versions"]) == {"python", "tensorflow", "keras", "numpy"}
    assert found["versions"]["keras"] == keras.__version__
    assert any(device["kind"] == "CPU" for device in found["devices"])
    one = {"layer": "Conv2D", "format": "float16", "onednn": True, "compiled": True, "milliseconds": 4.0}
    assert one in found["layers"]
    assert len(found["layers"]) == 2 * 3 * 4 - 2
    status, printed, _ = run(capsys, "doctor")
    assert status == 0
    assert printed.startswith("python ")
    for part in ("graph, no oneDNN", "–", found["verdict"], found["setting"]):
        assert part in printed


@pytest.mark.slow
def test_layers_are_timed_in_a_process_of_their_own():
    found = layer_times._in_a_process(0.001, onednn=False)
    assert [row[:2] for row in found] == [
        [layer, name] for layer in layer_times._LAYERS for name in layer_times.FORMATS
    ]
    assert all(time > 0 for row in found for time in row[2:])


def test_a_process_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(loops.LoopError, match="the process that times layers ended with status 1: it said nothing"):
        layer_times.measure()


def test_doctor_names_other_distributions_that_own_our_packages(capsys, monkeypatch, tmp_path, measured):
    wanted = {("scaler", "top_level.txt"), ("loops", "RECORD"), ("halfstep", "RECORD")}
    for package, told_by in wanted:
        folder = tmp_path / f"auto_{package}-1.2.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: auto_{package}\nVersion: 1.2\n")
        (folder / told_by).write_text(package if told_by == "top_level.txt" else f"{package}/__init__.py,,\nREADME,,\n")
        # Where the importlib_metadata package is imported, a distribution names only the files that are there.
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    status, printed, _ = run(capsys, "doctor", "--json")
    assert status == 0
    found = [(one["package"], one["distribution"], one["version"]) for one in strict(printed)["namesakes"]]
    assert sorted(found) == sorted((package, f"auto_{package}", "1.2") for package, _ in wanted)
    _, printed, _ = run(capsys, "doctor")
    for package, _ in wanted:
        told = f"The distribution auto_{package} 1.2 also installs a top-level package {package!r}."
        assert told in " ".join(printed.split())


def test_doctor_names_a_file_here_that_hides_one_of_our_packages(capsys, monkeypatch, tmp_path, measured):
    (tmp_path / "scaler.py").write_text("")
    monkeypatch.chdir(tmp_path)
    _, printed, _ = run(capsys, "doctor", "--json")
    (found,) = strict(printed)["namesakes"]
    assert (found["package"], found["file"]) == ("scaler", str(tmp_path / "scaler.py"))
    assert "hides the package 'scaler' of Halfstep" in found["advice"]


@pytest.mark.parametrize(
    ("float16", "said", "line"),
    [
        (
            (0.5, 0.5, 0.4),
            "float16 pays here: it takes 0.40 times float32's time at best (graph, no oneDNN), ",
            "ONEDNN",
        ),
        ((0.5, 0.5, 0.49), "float16 pays here: it takes 0.50 times float32's time at best (graph); ", "=False"),
        ((1.3, 1.05), "float16 is as fast as float32 here: it takes 1.05 times", "mixed_bfloat16 and"),
        ((90.0, 1.5), "does not pay here: it takes 1.50 times float32's time at best (XLA), and 90.00 times", "=False"),
        ((95.0, None, 1.4), "and 95.00 times in a graph, as fit runs it", "mixed_bfloat16 and"),
    ],
)
def test_the_verdict_follows_the_measurement(float16, said, line):
    found = times(float16=float16, bfloat16=(0.8,))
    assert said in layer_times.verdict(found)
    assert layer_times.verdict(found).endswith("bfloat16 takes 0.80 times (graph).")
    assert line in layer_times.to_copy(found)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "cifar"], ["'cifar'", "digits, mnist"]),
        (["train", "digits", "--policy", "float8"], ["'float8'", *POLICIES]),
        (["train", "digits", "--changed", "loss_scaler"], ["also give --resume"]),
        (["train", "digits", "--strategy", "warp"], ["'warp'", "none, static:SCALE"]),
        (["train", "digits", "--strategy", "dynamic:growth=2"], ["'growth=2'", "growth_interval"]),
        (["lab", "study", "cifar"], ["'cifar'", "digits, mnist"]),
        (["lab", "study", "--setup", "float8"], ["'float8'", "mixed-dynamic"]),
        (["lab", "study", "--strategy", "none", "--strategy", "headrom"], ["did you mean 'headroom'?"]),
        (["lab", "study", "--strategy", "headroom:memori=3"], ["did you mean 'memory'?", "relax_interval"]),
    ],
)
def test_what_makes_no_sense_is_named_in_one_line_with_status_2(capsys, tmp_path, arguments, named):
    status, printed, errors = run(capsys, *arguments, "--out", tmp_path / "out")
    assert (status, printed) == (2, "")
    assert errors.startswith("halfstep: ")
    assert errors.count("\n") == 1
    for text in named:
        assert text in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "digits", "--steps", "0"], "'0': expected an integer of at least 1"),
        (["train", "digits", "--checkpoint-every", "0"], "'0': expected an integer of at least 1"),
        (["train", "digits", "--seed", "-1"], "'-1': expected an integer in [0, 2^32)"),
        (["train", "digits", "--seed", str(2**32)], "expected an integer in [0, 2^32)"),
        (["lab", "study", "--setup", "float32", "--strategy", "none"], "not allowed with argument --setup"),
        (["lab", "study", "--seeds", "0"], "'0': expected an integer of at least 1"),
        (["lab", "study", "--steps", "1.5"], "'1.5': expected an integer of at least 1"),
        (["train"], "TASK"),
        (["fly"], "'fly'"),
        ([], "COMMAND"),
    ],
)
def test_arguments_that_cannot_be_read_have_status_2(capsys, arguments, named):
    status, printed, errors = run(capsys, *arguments)
    assert (status, printed) == (2, "")
    assert errors.startswith("usage: halfstep")
    assert named in errors.splitlines()[-1]


@pytest.mark.parametrize("command", ["train", "lab study"])
def test_a_folder_that_cannot_be_written_is_named_in_one_line_with_status_1(capsys, tmp_path, command):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        status, printed, errors = run(capsys, *command.split(), "digits", "--steps", 1, "--out", out)
        assert (status, printed) == (1, "")
        assert errors.startswith("halfstep: ")
        assert errors.count("\n") == 1
        assert str(tmp_path / "file") in errors


def test_a_task_whose_data_cannot_be_had_is_status_1(capsys, tmp_path, monkeypatch):
    def fail():
        raise Exception("no network")

    monkeypatch.setattr(keras.datasets.mnist, "load_data", fail)
    status, printed, errors = run(capsys, "train", "mnist", "--out", tmp_path / "out")
    assert (status, printed) == (1, "")
    assert errors.startswith("halfstep: MNIST could not be downloaded (no network)")
    assert errors.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["train", "lab study"])
def test_an_interrupt_is_one_line_and_status_130(capsys, tmp_path, monkeypatch, command):
    def stop(*_, **__):
        raise KeyboardInterrupt

    module, function = {"train": ("loops.run.train", "train"), "lab study": ("loops.study.compare", "run_study")}[
        command
    ]
    monkeypatch.setattr(importlib.import_module(module), function, stop)
    status, printed, errors = run(capsys, *command.split(), "digits", "--out", tmp_path)
    assert (status, printed) == (130, "")
    assert errors == "halfstep: interrupted; what was written so far is kept.\n"


@pytest.mark.parametrize("module", ["halfstep", "loops"])
def test_python_m_is_the_same_command(capsys, monkeypatch, module):
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert not exit.value.code
    printed = capsys.readouterr().out
    assert printed.startswith("usage: halfstep")
    for name in ("train", "doctor", "lab"):
        assert name in printed
