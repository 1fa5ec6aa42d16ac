"""The scripts in `benchmarks/` run and print what a program can read; what they find is theirs to say."""

import json
import os
import pathlib
import runpy
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import scaler

ROOT = pathlib.Path(__file__).parents[1]


def run(name, *arguments, timeout=300):
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=True,
    )


STEPS = ["gate", "step", "replicas", "first_call", "growth", "transaction"]
OTHERS = ["memory", "loop", "fit", "checkpoints", "observe", "bounds"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STEPS + OTHERS)
def test_a_benchmark_prints_figures_and_what_they_come_from(name):
    found = json.loads(run(f"{name}.py", "--json", "--quick").stdout)
    assert (found["benchmark"], found["quick"]) == (name, True)
    assert {"cpu", "cores", "gpus", "load", "tensorflow", "keras"} <= set(found["machine"])
    assert found["figures"]
    for figure in found["figures"]:
        assert figure["value"] >= 0
        assert (figure["reached"] is None) == (figure["target"] is None)
    for case in found["cases"].values():
        if "contenders" in case:
            assert case["rounds"] == 2
            assert case["contenders"][case["reference"]]["ratio"] == 1.0
            assert all(seen["minimum_ms"] > 0 for seen in case["contenders"].values())
        else:
            assert case["state"] >= 4 + 8  # A float32 weight and Adam's two slots.


@pytest.mark.exhaustive
def test_what_was_found_is_kept_in_a_file(tmp_path):
    run("all.py", "--only", "gate", "--quick", "--out", str(tmp_path))
    (path,) = tmp_path.glob("*.json")
    (found,) = json.loads(path.read_text())
    assert found["benchmark"] == "gate"
    assert "## gate" in path.with_suffix(".md").read_text()


@pytest.mark.exhaustive
def test_the_coverage_of_a_replay_is_measured_for_each_source_of_intervals():
    found = json.loads(run("replay_coverage.py", "--json", "--quick").stdout)
    assert len(found["cases"]) == 2 * 3
    assert {line["intervals from"] for line in found["coverage"]} == {"seeds", "validated", "wider"}
    assert {line["skip_rate"] for line in found["static"]} == {0.0}


@pytest.mark.exhaustive
def test_a_forecast_is_measured_on_runs_that_are_recorded_once(tmp_path):
    command = ("forecast_runs.py", "--quick", "--out", str(tmp_path))
    found = json.loads(run(*command, "--json").stdout)
    assert [case["run"] for case in found["cases"]] == ["cnn-ramp-10", "attention-noise-14"]
    written = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert "| all | 0 | 0 |" in run(*command).stdout
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written


PATH = pathlib.Path(__file__).parents[1] / "benchmarks" / "headroom.py"


@pytest.fixture(scope="module")
def benchmark():
    return runpy.run_path(str(PATH))


@pytest.mark.parametrize("exponent", [-14, 0, 15, 24, 40])
def test_flushed_gradients_are_those_that_a_cast_makes_zero(benchmark, exponent):
    # Powers of two themselves lie on the edges: 2^-25 is still flushed.
    values = (np.float32(2.0) ** np.arange(-60, 20).astype(np.float32)) * np.float32(1.25)
    histogram = np.bincount(np.floor(np.log2(values)).astype(int) + 60, minlength=81)
    scaled = np.minimum(values * np.float32(2.0**exponent), 60000.0).astype(np.float16)
    assert benchmark["flushed"](histogram, float(exponent)) == (scaled == 0).sum()


def test_a_replay_skips_where_the_largest_gradient_overflows(benchmark):
    histogram = np.zeros(81, np.int64)
    histogram[0] = 3  # All of them at 2^-60.
    histogram[60] = 1
    seen = [benchmark["Gradients"](np.float32(1.0), np.float32(size), histogram) for size in (1.0, 200.0, 1.0)]
    found = benchmark["replay"](scaler.Dynamic(2.0**10), seen)
    assert found["skipped"] == [1]
    assert found["log2_scale"] == pytest.approx([(10 + 10 + 9) / 3])
    assert found["flushed"] == [0.75]
    side_by_side = benchmark["replay"](scaler.Headroom(headroom=tf.constant([1, 3])), seen, words=2)
    np.testing.assert_allclose(side_by_side["log2_scale"], [(15 + 14 + 13) / 3, (15 + 12 + 11) / 3])
    np.testing.assert_array_equal(side_by_side["skipped"], [1, 1])


def test_losses_of_a_kind_are_the_same_every_time(benchmark):
    for kind in benchmark["KINDS"]:
        factors = benchmark["factors"](kind, 400)
        np.testing.assert_array_equal(factors, benchmark["factors"](kind, 400))
        assert factors.dtype == np.float32
    assert set(benchmark["factors"]("jumps", 400)) == {1.0, np.float32(2.0**-12)}
