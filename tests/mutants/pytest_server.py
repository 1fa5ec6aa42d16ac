"""Runs pytest again and again without importing TensorFlow again and again: a mutation tester's inner loop.

    python pytest_server.py serve SOCKET            imports the libraries once, then forks for every request
    python pytest_server.py ask SOCKET ARGUMENT...  has it run pytest with these arguments, and exits as pytest does

The server imports no module of this repository, so each fork reads the source as it is on disk at that moment. It
starts no TensorFlow runtime either: a fork of a process with one would wait for threads that are not there.
"""

from __future__ import annotations

import json
import os
import pathlib
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.02
# Hypothesis's plugin was imported before pytest could rewrite its assertions.
QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider")


def serve(path: str) -> None:
    """Answers requests, one at a time, until it or who started it has ended."""
    # As in conftest.py, which is read when TensorFlow has its settings already.
    if "avx512_fp16" in pathlib.Path("/proc/cpuinfo").read_text(errors="replace"):
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    import hypothesis.extra.numpy
    import keras
    import ml_dtypes
    import pytest
    import tensorflow as tf

    del hypothesis, keras, ml_dtypes, tf
    sys.dont_write_bytecode = True
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        starter = os.getppid()
        while os.getppid() == starter:
            if not select.select([server], [], [], 1.0)[0]:
                continue
            connection, _ = server.accept()
            with connection:
                arguments = json.loads(connection.makefile().readline())
                child = os.fork()
                if child == 0:
                    os.setsid()
                    _run(pytest, connection, arguments)
                code = _wait(child, connection)
                if code is not None:
                    connection.sendall(f"\nexit {code}\n".encode())


def ask(path: str, arguments: list[str]) -> int:
    """Prints what pytest printed and returns its exit status."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall((json.dumps(arguments) + "\n").encode())
        text = connection.makefile(errors="replace").read()
    output, _, last = text.rpartition("\nexit ")
    print(output)
    return int(last)


def _run(pytest, connection: socket.socket, arguments: list[str]) -> None:
    code = 70
    try:
        os.dup2(connection.fileno(), 1)
        os.dup2(connection.fileno(), 2)
        code = int(pytest.main([*QUIET, *arguments]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, connection: socket.socket) -> int | None:
    """The exit status of the child, or None if the client went away, as it does at a timeout, and the child with it."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        readable, _, _ = select.select([connection], [], [], POLL_SECONDS)
        if readable and not connection.recv(1):
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None


def copy_repository(target: pathlib.Path) -> None:
    """Copies what the tests need."""
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    # What `make study` and `make docs` wrote: the size of its runs, and the pages.
    for written in ("study", "docs/_build"):
        shutil.rmtree(target / written, ignore_errors=True)


class Server:
    """A `pytest_server.py` in `copy` while the block runs; gives the path of its socket."""

    def __init__(self, copy: pathlib.Path):
        self._socket = str(copy.parent / "socket")
        environment = {
            **os.environ,
            "PYTHONPATH": str(copy),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "HYPOTHESIS_PROFILE": "mutants",
        }
        command = [sys.executable, "-B", __file__, "serve", self._socket]
        self._process = subprocess.Popen(command, cwd=copy, env=environment, stderr=subprocess.DEVNULL)

    def __enter__(self) -> str:
        while not os.path.exists(self._socket):
            if self._process.poll() is not None:
                raise SystemExit("the server ended before it listened")
            time.sleep(0.1)
        return self._socket

    def __exit__(self, *error) -> None:
        self._process.terminate()
        self._process.wait()


if __name__ == "__main__":
    command, socket_path, *rest = sys.argv[1:]
    sys.exit(serve(socket_path) if command == "serve" else ask(socket_path, rest))
