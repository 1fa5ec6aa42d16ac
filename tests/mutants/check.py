"""Applies every hand-made breakage to a copy of the repository and requires its test to go red.

    python tests/mutants/check.py [NAME ...]

Exits with 1 if a breakage goes unnoticed, if its patch no longer applies (then make it anew, or drop it with the code
it was about), or if a test is red without it.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import time

import pytest_server
from breakages import BREAKAGES

PATCHES = pathlib.Path(__file__).resolve().parent / "patches"
GREEN, RED = 0, 1


def main(names: list[str]) -> int:
    """Prints one line a breakage and returns how many are wrong, at most 1."""
    start, wrong = time.monotonic(), _unlisted()
    chosen = {name: BREAKAGES[name] for name in names} if names else BREAKAGES
    with tempfile.TemporaryDirectory(prefix="halfstep-breakages-") as folder:
        copy = pathlib.Path(folder) / "repo"
        pytest_server.copy_repository(copy)
        # Without a repository of its own, git looks for one above and silently leaves out what lies outside of it.
        subprocess.run(["git", "init", "--quiet", str(copy)], check=True)
        with pytest_server.Server(copy) as socket:
            code, output = _pytest(socket, sorted(set(chosen.values())))
            if code != GREEN:
                print(output, "\nred without any breakage: nothing can be said")
                return 1
            for name, test in chosen.items():
                verdict = _verdict(copy, socket, name, test)
                wrong += [name] if verdict else []
                print(f"{verdict or 'noticed':20} {name:40} {test}", flush=True)
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} breakages were noticed, {time.monotonic() - start:.0f} s")
    return int(bool(wrong))


def _verdict(copy: pathlib.Path, socket: str, name: str, test: str) -> str:
    """What is wrong, or nothing."""
    patch = PATCHES / f"{name}.patch"
    if _git_apply(copy, patch):
        return "DOES NOT APPLY"
    code, output = _pytest(socket, ["-x", test])
    if _git_apply(copy, patch, "--reverse"):
        raise SystemExit(f"{name}: cannot be taken back")
    if code == RED:
        return ""
    return "WENT UNNOTICED" if code == GREEN else f"BROKE PYTEST\n{output}"


def _git_apply(copy: pathlib.Path, patch: pathlib.Path, *options: str) -> int:
    command = ["git", "apply", "--recount", "-C1", *options, str(patch)]
    return subprocess.run(command, cwd=copy, capture_output=True, check=False).returncode


def _pytest(socket: str, arguments: list[str]) -> tuple[int, str]:
    command = [sys.executable, pytest_server.__file__, "ask", socket, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def _unlisted() -> list[str]:
    """Patches that no test is named for, and names without a patch."""
    odd = sorted({path.stem for path in PATCHES.glob("*.patch")} ^ set(BREAKAGES))
    for name in odd:
        print(f"{'PATCH OR LIST?':20} {name}")
    return odd


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
