"""Mutation score of the pure parts, by cosmic-ray: the share of small breakages that a module's own tests notice.

    python tests/mutants/score.py [--only stuck] [--sample 40] [--tool .venv-mutants/bin]

It works in a copy. A survivor counts as explained if `equivalent.md` gives its module, its line before and after, and
why no test can tell the two apart. Exits with 1 if fewer than 95% are killed or explained.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import re
import shlex
import sqlite3
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import pytest_server

HERE = pathlib.Path(__file__).resolve().parent
WANTED = 0.95
TIMEOUT_SECONDS = 120
_STRATEGIES = "tests/scaler/strategies"
_LIMITS = f"{_STRATEGIES}/test_limits.py"
_RESEARCH = [_LIMITS, f"{_STRATEGIES}/test_research_traces.py", f"{_STRATEGIES}/test_research_promise.py"]
_AROUND = [_LIMITS, f"{_STRATEGIES}/test_combinators.py", f"{_STRATEGIES}/test_research_promise.py"]
_PRESETS = [f"tests/conformance/test_{name}.py" for name in ("against_rules", "presets_in_a_scaler", "preset_values")]


def _about(files: list[str], words: str) -> list[str]:
    """The tests in these files whose names have one of the words, each run once and not in every mode."""
    return [*files, "-k", f"({' or '.join(words.split())}) and not (eager or graph or xla or keeps_the or every_way)"]


# Each module with the tests that are about it. XLA and the other ways to run a step say nothing new about its numbers.
NARROW = {
    "strategies/base": ["tests/scaler/test_bad_input.py", f"{_STRATEGIES}/test_events.py"],
    "strategies/dynamic": [
        "tests/scaler/test_bad_input.py",
        *("tests/scaler/strategies/test_dynamic_invariants.py", "tests/scaler/strategies/test_dynamic.py"),
        *("-k", "not eager and not graph and not xla"),
    ],
    "strategies/static": ["tests/scaler/strategies/test_static.py", "tests/scaler/test_bad_input.py"],
    "strategies/no_scaling": [
        "tests/scaler/strategies/test_static.py",
        "tests/scaler/test_foreign_scales.py",
        "-k",
        "not xla",
    ],
    "strategies/amax": _about(_RESEARCH, "headroom delayed log_normal lognormal gradients_of_zero limits refused"),
    "strategies/histogram": _about(_RESEARCH, "histogram limits refused"),
    "strategies/smooth": _about(_RESEARCH, "smooth limits refused"),
    "strategies/adaptive": [_LIMITS, f"{_STRATEGIES}/test_adaptive.py", "-k", "not eager and not graph and not xla"],
    "strategies/exact": [f"{_STRATEGIES}/test_exact.py", "-k", "narrowed or not (eager or graph or xla)"],
    "strategies/limits": _about(
        _AROUND, "bounded warm risingfloor scheduled used_late overflow bounds combinator limits refused defaults"
    ),
    "strategies/spike_guard": [
        *(f"{_STRATEGIES}/test_spike_guard.py", f"{_STRATEGIES}/test_tensor_norms.py"),
        *("-k", "not xla and not promise"),
    ],
    "strategies/joined": _about(_AROUND, "risingfloor scheduled combinator overflow limits refused"),
    "presets/torch_systems": _about(
        _PRESETS,
        "pytorch fairscale nemo apex deepspeed megatron colossalai guided_diffusion dalle fairseq metaseq refused",
    ),
    "presets/other_systems": _about(
        _PRESETS, "flax jmp optax keras tf_contrib openseq2seq mxnet mindspore paddle chainer nnabla refused"
    ),
    "presets/rules/precision": _about(_PRESETS, "mindspore nnabla paddle metaseq dalle"),
    "presets/rules/climbs": _about(_PRESETS, "chainer guided_diffusion dalle refused"),
    "presets/rules/streak": _about(
        [*_PRESETS, _AROUND[1]], "deepspeed paddle nnabla mindspore tf_contrib apex mxnet used_late refused"
    ),
    "presets/rules/tolerance": _about(_PRESETS, "fairseq metaseq policy stuck deepspeed refused"),
    "checks": ["tests/scaler/test_bad_input.py"],
    "backend/formats": ["tests/scaler/test_formats.py", "tests/scaler/test_bad_input.py", "-k", "not random_bit"],
    "gradients/clipping": [
        *("tests/scaler/test_clipping.py", "tests/scaler/test_bad_input.py"),
        *("-k", "not xla and not loop and not clusters and not packed and not power"),
    ],
    "gradients/lists": [
        *("tests/scaler/test_gradients.py", "tests/scaler/test_clipping.py"),
        *("-k", "not xla and not clusters and not packed and not power"),
    ],
    "gradients/measurement": ["tests/scaler/test_measurement.py"],
    "rounding": ["tests/scaler/test_rounding.py", "-k", "not eager and not graph and not xla"],
    "gradients/statistics": ["tests/scaler/test_statistics.py", "-k", "not eager and not graph and not xla"],
    "outcome/outcome": ["tests/scaler/test_outcome_sentences.py"],
    "outcome/stuck": ["tests/scaler/test_stuck_policy.py"],
}
# `X | None` in annotations is never evaluated.
CONFIGURATION = """
[cosmic-ray]
module-path = "scaler/{module}.py"
timeout = {timeout}
excluded-modules = []
test-command = "{command}"
[cosmic-ray.distributor]
name = "local"
[cosmic-ray.filters.operators-filter]
exclude-operators = ["core/ReplaceBinaryOperator_BitOr_.*"]
"""


class Mutant(NamedTuple):
    """One breakage that was tried."""

    module: str
    before: str
    after: str
    killed: bool


def main() -> int:
    """Prints the score of each module and of all, and every survivor that nobody explained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=NARROW, help="a module; may be given several times")
    parser.add_argument("--sample", type=int, help="so many random mutants of each module; all if not given")
    parser.add_argument(
        "--tool", type=pathlib.Path, default=pytest_server.ROOT / ".venv-mutants/bin", help="where cosmic-ray is"
    )
    options = parser.parse_args()
    tool, explained = options.tool.resolve(), _explained()
    known, counted, missing = 0, 0, []
    with tempfile.TemporaryDirectory(prefix="halfstep-mutants-") as folder:
        copy = pathlib.Path(folder) / "repo"
        pytest_server.copy_repository(copy)
        with pytest_server.Server(copy) as socket:
            for module in options.only or NARROW:
                start, mutants = time.monotonic(), _run(module, copy, tool, socket, options.sample)
                alive = [mutant for mutant in mutants if not mutant.killed]
                unknown = [mutant for mutant in alive if mutant[:3] not in explained]
                print(
                    f"{module}: {len(mutants)} mutants, {len(mutants) - len(alive)} killed, "
                    f"{len(alive) - len(unknown)} explained, {len(unknown)} unexplained, "
                    f"{time.monotonic() - start:.0f} s",
                    flush=True,
                )
                for mutant in unknown:
                    print(f"    {mutant.before}\n    -> {mutant.after}", flush=True)
                counted, known, missing = counted + len(mutants), known + len(mutants) - len(unknown), missing + unknown
    share = known / max(counted, 1)
    print(f"killed or explained: {known} of {counted}, {share:.1%} (wanted: {WANTED:.0%})")
    return int(share < WANTED)


def _run(module: str, copy: pathlib.Path, tool: pathlib.Path, socket: str, sample: int | None) -> list[Mutant]:
    session, configuration = copy / "session.sqlite", copy / "cosmic-ray.toml"
    session.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "pytest_server.py"), "ask", socket, "-x", *NARROW[module]]
    quoted = shlex.join(command).replace('"', '\\"')
    configuration.write_text(CONFIGURATION.format(module=module, timeout=TIMEOUT_SECONDS, command=quoted))
    if subprocess.run(command, cwd=copy, stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit(f"{module}: its tests fail without any mutation: {shlex.join(NARROW[module])}")
    _call(copy, tool / "cosmic-ray", "init", configuration, session)
    _call(copy, tool / "cr-filter-operators", session, configuration)
    if sample is not None:
        _keep(session, sample)
    _call(copy, tool / "cosmic-ray", "exec", configuration, session)
    with sqlite3.connect(session) as database:
        rows = database.execute("select diff, test_outcome from work_results where test_outcome is not null").fetchall()
        failed = database.execute("select output from work_results where worker_outcome = 'EXCEPTION'").fetchall()
    database.close()
    if failed:
        raise SystemExit(f"{module}: cosmic-ray could not try {len(failed)} mutants, the first: {failed[0][0]}")
    return [Mutant(module, *_change(diff), outcome.upper() != "SURVIVED") for diff, outcome in rows]


def _keep(session: pathlib.Path, count: int) -> None:
    """Leaves `count` random mutants in the session, the same ones each time."""
    with sqlite3.connect(session) as database:
        jobs = [job for (job,) in database.execute("select job_id from mutation_specs order by rowid")]
        left_out = random.Random(0).sample(range(len(jobs)), max(len(jobs) - count, 0))
        for table in ("mutation_specs", "work_items", "work_results"):
            database.executemany(f"delete from {table} where job_id = ?", [(jobs[i],) for i in left_out])
    database.close()


def _change(diff: str) -> tuple[str, str]:
    """The lines taken out and put in by a diff, each as one line."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    return tuple(" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")


def _explained() -> set[tuple[str, str, str]]:
    """Module, line before and line after from each row of `equivalent.md`."""
    text = (HERE / "equivalent.md").read_text()
    return set(re.findall(r"^- ([\w/]+): `` (.*?) `` -> `` (.*?) ``: ", text, re.MULTILINE))


def _call(copy: pathlib.Path, *command) -> None:
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
