"""`make keras-tests` as a test."""

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.mark.exhaustive
def test_keras_own_tests_pass_with_ours_in_the_place_of_its_class():
    done = subprocess.run(
        [sys.executable, str(HERE / "keras_own_tests.py")],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "loss_scale_optimizer_test: 29 tests, 7 skipped, 0 failed" in done.stdout
