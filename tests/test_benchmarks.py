"""The scripts in `benchmarks/` run and print what a program can read; what they find is theirs to say."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def test_faults_prints_a_verdict_for_each_side():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "faults.py"), "--json", "--only", "NaN in the data"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (row,) = json.loads(done.stdout)["faults"].values()
    assert set(row) == {"halfstep", "keras"}
    for verdict in row.values():
        assert set(verdict) == {"word", "seen"}
        assert verdict["word"] in {"survived", "corrupted", "stuck", "stretched", "wrong", "crashed"}
