"""Several workers on one machine, each a process that runs the same command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence

from halfstep.commands.shared import EXIT_INTERRUPTED, EXIT_WORKER_LOST
from loops.support.errors import LoopError, WorkerLost

_LAUNCHED = "HALFSTEP_LAUNCHED"
_GRACE = 60.0
"""Seconds that the other workers have to end by themselves after one has failed."""


def launch(arguments: Sequence[str], count: int) -> None:
    """Runs a command once for each worker, connected over the loopback interface, until all have ended.

    SIGTERM and SIGINT are forwarded to the workers, which save and end. They do so, too, if this process is killed.
    Workers use the CPUs only; to use several GPUs, run replicas in one process.

    Args:
        arguments: The arguments of the command.
        count: The number of workers.

    Raises:
        WorkerLost: If a worker was killed. The others ended with what all had saved.
        LoopError: If a worker failed; its output says why.
        KeyboardInterrupt: After SIGINT.
        SystemExit: With the workers' exit status, if they ended in another way.
    """
    workers = [f"127.0.0.1:{port}" for port in _free_ports(count)]
    processes: list[subprocess.Popen] = []

    def forward(number: int, frame: types.FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for index in range(count):
            task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
            own = {"TF_CONFIG": json.dumps(task), "CUDA_VISIBLE_DEVICES": "", _LAUNCHED: "1"}
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "halfstep", *arguments, "--workers", "1"],
                    env={**os.environ, **own},
                    stdin=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C reaches them through this process, and once.
                )
            )
        _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdin
            process.stdin.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    _raise([process.returncode for process in processes])


def leave_with_the_launcher() -> None:
    """Makes a worker that `launch` started end as after SIGTERM once the launcher is gone, however that ended."""
    if os.environ.get(_LAUNCHED):
        threading.Thread(target=_end_with_the_input, daemon=True).start()


def _end_with_the_input() -> None:
    # The launcher holds the other end of the pipe and writes nothing, so this returns when it is gone.
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _wait(processes: Sequence[subprocess.Popen]) -> None:
    """Waits until all have ended, but no longer than `_GRACE` seconds after one has failed."""
    limit: float | None = None
    while any(process.poll() is None for process in processes):
        if limit is None and any(process.returncode for process in processes):
            limit = time.monotonic() + _GRACE
        if limit is not None and time.monotonic() > limit:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            next(process for process in processes if process.returncode is None).wait(0.2)


def _raise(statuses: Sequence[int]) -> None:
    failed = [(worker, status) for worker, status in enumerate(statuses) if status not in (0, EXIT_WORKER_LOST)]
    # A worker that `launch` killed is not the cause if another one failed.
    worker, status = min(failed, key=lambda one: one[1] == -signal.SIGKILL, default=(0, max(statuses)))
    if status < 0:
        raise WorkerLost(
            f"worker {worker} was ended by {signal.Signals(-status).name}, and with it the run. The same command with "
            "--resume goes on from what all workers have saved."
        )
    if status == 1:
        raise LoopError(f"worker {worker} stopped with the error above.")
    if status == EXIT_WORKER_LOST:
        raise WorkerLost("the workers lost each other, as said above.")
    if status == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if status:
        raise SystemExit(status)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]
