"""Guards `make gpu`: what it says without a GPU, what a part that fails does, and how a profile is counted.

Its parts run on CPUs that stand in for GPUs.
"""

import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from loops.diagnose.doctor.machine import Gpu, Surroundings

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def modules(monkeypatch):
    """`gpu_page` and `profiled`, as benchmarks import each other."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    level = tf.get_logger().level
    import gpu_page
    import profiled

    tf.get_logger().setLevel(level)
    return gpu_page, profiled


@pytest.fixture
def main(modules, monkeypatch, tmp_path):
    """Runs the command on a machine with a card, and returns its status and the page."""

    def run(*parts, **others):
        page = modules[0]
        facts = {"build": {"cuda_version": "12.5.1"}, "version": "2.21.0", "card": True, "driver": "580.95.05"}
        found = Surroundings(**{**facts, "gpus": [Gpu("NVIDIA H100 80GB HBM3", (9, 0))], **others})
        monkeypatch.setattr(page, "surroundings", lambda: found)
        monkeypatch.setattr(page, "PARTS", {part: (part, part) for part in parts})
        monkeypatch.setattr(sys, "argv", ["gpu_page.py", "--out", str(tmp_path)])
        status = page.main()
        return status, "".join(path.read_text() for path in tmp_path.glob("*-nvidia-h100-80gb-hbm3.md"))

    return run


def test_a_part_that_fails_leaves_the_others_and_is_the_status(main):
    good = """-c 'print("{\\"figures\\": [], \\"cases\\": {\\"good\\": {\\"figure\\": 3}}}")'"""
    prints_nothing = "-c 0"
    status, page = main("-c 'raise SystemExit(\"it broke\")'", good, prints_nothing)
    assert status == 1
    assert page.startswith("# NVIDIA H100 80GB HBM3, 20")
    assert "driver 580.95.05; CUDA of the build 12.5.1" in page
    verdicts = [line.split(" | ")[-2] for line in page.splitlines() if line.startswith("| -c ")]
    assert verdicts == ["FAILED", "passed", "FAILED"]
    assert "it broke" in page
    assert "- good: figure 3" in page


def test_all_passed_is_status_0(main):
    status, page = main("""-c 'print("{\\"figures\\": [], \\"cases\\": {}}")'""")
    assert status == 0
    assert "FAILED" not in page
    assert "stood in" not in page


def test_a_page_of_cpus_says_that_its_figures_are_no_gpus(modules):
    found = Surroundings(build={}, version="2.21.0", card=False, driver=None, gpus=[])
    assert "CPUs stood in for GPUs" in modules[0].page("CPUs", found, [], True)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"gpus": [], "card": False}, "There is no GPU here."),
        (
            {"gpus": [], "build": {"is_cuda_build": True, "cuda_version": "12.5.1"}, "driver": "470.82.01"},
            "driver 470.82.01: too old for CUDA 12.5.1 and this card. Install 525.60 or newer.",
        ),
        (
            {"driver": "470.82.01"},  # There is no machine code for this card, which then needs what made the PTX.
            "driver 470.82.01: too old for CUDA 12.5.1 and this card. Install 555 or newer.",
        ),
    ],
    ids=["no GPU", "a driver too old to see it", "a driver too old for its PTX"],
)
def test_where_no_gpu_can_be_used_a_sentence_says_why(main, capsys, others, said):
    assert main("-c 1", **others) == (3, "")
    assert capsys.readouterr().err == f"{said}\n"


def test_a_profile_is_counted(modules):
    space = xplane_pb2.XSpace()
    gpu, host = space.planes.add(name="/device:GPU:0"), space.planes.add(name="/host:CPU")
    gpu.stat_metadata[1].name = "memcpy_details"
    gpu.stat_metadata[2].name = "kind_src:device kind_dst:pinned size:400 dest:0 async:1"
    for plane, names in (
        (gpu, ["MemcpyD2H", "MemcpyD2H", "MemcpyH2D", "MemcpyD2D", "a_kernel"]),
        (host, ["cuMemcpyDtoHAsync_v2", "cuStreamSynchronize", "cuCtxSynchronize", "cuLaunchKernel", "MemcpyD2H"]),
    ):
        line = plane.lines.add()
        for number, name in enumerate(names, 1):
            plane.event_metadata[number].name = name
            line.events.add(metadata_id=number)
    events = gpu.lines[0].events
    events[0].stats.add(metadata_id=1, str_value="kind_src:device kind_dst:pageable size:1 dest:0 async:1")
    events[1].stats.add(metadata_id=1, ref_value=2)
    events[3].stats.add(metadata_id=1, str_value="kind_src:device kind_dst:device size:9999 dest:0 async:1")
    seen = modules[1].counted([space.SerializeToString()] * 2, 4)
    assert seen == modules[1].Seen(to_host=1.0, to_device=0.5, waits=1.0, largest=400, on_gpu=2.5)


@pytest.mark.exhaustive
def test_every_part_runs_with_cpus_in_place_of_gpus(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_page.py"), "--stand-in", "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    (path,) = tmp_path.glob("*-cpus-in-place-of-gpus.md")
    text = path.read_text()
    assert done.returncode == 0, text
    assert text.count("| passed |") == 7
    for found in (
        "| Dynamic: copies to the host | 0.00 |  | ≤ 2 | reached |",
        "1 passed",
        "replicas CPU:0, CPU:1",
        "| a loop in the graph: spoiled steps that moved a bit | 0.00 |  | ≤ 0 | reached |",
        "float16 with masters: to mixed_float16, no scaler",
        "nothing joined",
    ):
        assert found in text
