"""All that is claimed of GPUs, tried on one: copies, waits, faults, the promise, replicas, and what scaling costs.

    python benchmarks/gpu_page.py [--stand-in] [--out benchmarks/results]

Each part runs in a process of its own, and one that fails leaves the others' results in place. One page has them all,
`<date>-<card>.md`. The status is 1 if a part failed, and 3 where there is no GPU that TensorFlow can use. With
`--stand-in` CPUs take the GPU's place and sizes are small, to see that it runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
from typing import NamedTuple

import pages
import paired

from loops.diagnose.doctor.machine import Surroundings, about_gpus, surroundings, unusable

NO_GPU = 3
ROOT = pathlib.Path(__file__).parents[1]
PROMISE, RESUME = "tests/properties/test_promise_machine.py", "tests/loops/loop/test_exact_resume.py"
PARTS = {
    "Copies and waits, beside the audit": ("benchmarks/gpu_copies.py", "benchmarks/gpu_copies.py --quick"),
    "Faults": (
        '-m pytest -m "not exhaustive" tests/faults',
        '-m pytest tests/faults/test_fault_04_bad_data.py -k "hand and graph"',
    ),
    "The promise, through random rules": (
        f"-m pytest -m exhaustive {PROMISE}::test_many_rules[2000]",
        f"-m pytest -m exhaustive {PROMISE}::test_many_rules[100]",
    ),
    "Runs that go on in a new process, bit for bit": (
        f'-m pytest -m "not exhaustive" {RESUME}',
        f'-m pytest -m "not exhaustive" {RESUME} -k "in_a_new_process and before"',
    ),
    "Replicas": ("benchmarks/gpu_replicas.py", "benchmarks/gpu_replicas.py --quick"),
    "Number formats": ("benchmarks/gpu.py", "benchmarks/gpu.py --quick"),
    "What to join, to compile and to select": ("benchmarks/gpu_choices.py", "benchmarks/gpu_choices.py --quick"),
}
"""What Python is given on a GPU, and on a CPU in its place."""
# A test starts processes, with which it shares the GPU's memory.
ENVIRONMENT = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
# Tests compare runs bit for bit, and sums on a GPU come in any order unless TensorFlow is told otherwise.
OF_TESTS = {"TF_DETERMINISTIC_OPS": "1"}
HANGS = 3600
"""Seconds."""


NO_FIGURES = (
    "CPUs stood in for GPUs, with small sizes and two rounds, to see that every part runs. No figure below says "
    "anything about a GPU, whatever it says was reached or missed."
)


class Result(NamedTuple):
    """What a part came to, and its lines of the page."""

    title: str
    passed: bool
    seconds: float
    lines: list[str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stand-in", action="store_true", help="CPUs in place of GPUs and small sizes, to see it run")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results", metavar="FOLDER")
    options = parser.parse_args()
    found = surroundings()
    reason = None if options.stand_in else unusable(found)
    if reason:
        print(reason, file=sys.stderr)
        return NO_GPU
    results = [run(title, commands[options.stand_in]) for title, commands in PARTS.items()]
    card = "CPUs in place of GPUs" if options.stand_in else found.gpus[0].name
    today = datetime.date.today().isoformat()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{today}-{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}.md"
    path.write_text(page(f"{card}, {today}", found, results, options.stand_in), encoding="utf-8")
    print(f"written to {path}", file=sys.stderr)
    return int(not all(result.passed for result in results))


def run(title: str, command: str) -> Result:
    """A part, in a process of its own."""
    print(f"{title} ...", file=sys.stderr, flush=True)
    is_test = command.startswith("-m pytest")
    arguments = [sys.executable, *shlex.split(command), *([] if is_test else ["--json"])]
    environment = {**os.environ, **ENVIRONMENT, **(OF_TESTS if is_test else {})}
    start = time.perf_counter()
    try:
        done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANGS)
        lines = (_of_tests if is_test else _of_a_benchmark)(done.stdout)
        passed = done.returncode == 0 and bool(lines)
        if not passed:
            lines += ["", "```", *done.stderr.splitlines()[-20:], "```"]
    except subprocess.TimeoutExpired:
        passed, lines = False, [f"It was stopped after {HANGS} seconds."]
    return Result(title, passed, time.perf_counter() - start, [f"`python {command}`", "", *lines])


def page(title: str, found: Surroundings, results: list[Result], stand_in: bool) -> str:
    """All of it: the machine, a line for each part, then each part."""
    facts = {**paired.machine(), "driver": found.driver, "CUDA of the build": found.build.get("cuda_version")}
    lines = [f"# {title}", "", "; ".join(f"{key} {value}" for key, value in facts.items()), ""]
    if stand_in:
        lines += [f"**{NO_FIGURES}**", ""]
    lines += [*(f"- {line}" for line in about_gpus(found)), "", "| part | | seconds |", "|---|---|---|"]
    lines += [f"| {one.title} | {'passed' if one.passed else 'FAILED'} | {one.seconds:.0f} |" for one in results]
    for one in results:
        lines += ["", f"## {one.title}", "", *one.lines]
    return "\n".join(lines) + "\n"


def _of_tests(output: str) -> list[str]:
    """Which failed, and pytest's last line, with how many passed."""
    lines = output.splitlines()
    return ["```", *(line for line in lines if line.startswith(("FAILED", "ERROR"))), *lines[-1:], "```"]


def _of_a_benchmark(output: str) -> list[str]:
    try:
        found = json.loads(output)
    except json.JSONDecodeError:
        return []
    cases = [line for title, case in found["cases"].items() for line in pages.contenders(title, case)]
    return [*pages.figures(found["figures"]), "", *cases]


if __name__ == "__main__":
    sys.exit(main())
