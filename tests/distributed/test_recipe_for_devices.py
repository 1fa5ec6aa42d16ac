"""The recipe for several devices prints what its page shows: alone on two devices, and as two workers."""

import doctest
import os
import pathlib
import re
import subprocess
import sys

import pytest
from worker_cases import configuration, free_ports

import scaler

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(scaler.__file__).parents[1]
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "recipes" / "devices.md"


@pytest.mark.exhaustive_with("2", "1")
@pytest.mark.parametrize("processes", [1, 2])
def test_the_recipe_prints_what_its_page_shows(processes, tmp_path):
    ports = free_ports(processes)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    common = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    workers = [{"TF_CONFIG": configuration(ports, index)} for index in range(processes)] if processes > 1 else [{}]
    started = [
        subprocess.Popen(
            [sys.executable, PAGE.with_suffix(".py")],
            cwd=tmp_path,
            env={**common, **own},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for own in workers
    ]
    (shown,) = re.findall(r"^```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for process in started:
        printed, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors[-2000:]
        assert doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS), printed
