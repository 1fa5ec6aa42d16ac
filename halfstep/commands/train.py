"""`halfstep train`: one run, also of several workers on one machine, each a process that runs the same command."""

from __future__ import annotations

import argparse
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
from typing import Any

from halfstep.commands.shared import EXIT_INTERRUPTED, EXIT_WORKER_LOST, FORMS, POLICIES, TASKS, count, seed

_LAUNCHED = "HALFSTEP_LAUNCHED"
_GRACE = 60.0
"""Seconds that the other workers have to end by themselves after one has failed."""


def add_train(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("train", help="train one task and write DIR/summary.json and DIR/steps.jsonl")
    parser.add_argument("task", metavar="TASK", help=f"{', '.join(TASKS[:-1])} or {TASKS[-1]}")
    parser.add_argument(
        "--policy", default="mixed_float16", help=f"Keras dtype policy: {', '.join(POLICIES)} (default: %(default)s)"
    )
    parser.add_argument(
        "--strategy",
        default="dynamic",
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"{FORMS} (default: %(default)s)",
    )
    parser.add_argument("--steps", type=count, default=400, help="batches to take (default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="(default: %(default)s)")
    parser.add_argument("--out", default="run", metavar="DIR", help="(default: %(default)s)")
    parser.add_argument(
        "--checkpoint-every",
        type=count,
        metavar="N",
        help="save DIR/checkpoints every N steps (default: never)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint; start from the beginning if there is none",
    )
    parser.add_argument(
        "--changed",
        action="append",
        default=[],
        metavar="NAME",
        help="with --resume: go on although this setting differs from the run's, such as loss_scaler after another "
        "--strategy; may be given several times",
    )
    parser.add_argument(
        "--trace",
        type=count,
        nargs="?",
        const=100,
        metavar="EVERY",
        help="record DIR/trace.arrow for halfstep lab replay, with the histograms of every EVERY-th step (100)",
    )
    parser.add_argument(
        "--workers",
        type=count,
        default=1,
        metavar="N",
        help="train in N processes on the CPUs of this machine, each with an equal share of every batch; on several "
        "machines start the command on each, without this option and with TF_CONFIG set (default: %(default)s)",
    )
    parser.add_argument(
        "--wait",
        type=count,
        default=300,
        metavar="SECONDS",
        help="how long workers wait for each other at the start (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> None:
    import scaler
    from halfstep.terminal import progress
    from loops import tasks
    from loops.loop.workers import addresses, join_workers
    from loops.record.files import to_json
    from loops.run.train import RunOptions, train

    if options.resume and not options.checkpoint_every:
        raise scaler.InvalidArgument(
            "--resume continues from checkpoints and saves more: also give --checkpoint-every N."
        )
    if options.changed and not options.resume:
        raise scaler.InvalidArgument("--changed says what differs from the run that goes on: also give --resume.")
    named = addresses()
    if options.workers > 1 and named:
        raise scaler.InvalidArgument(
            "--workers starts the workers of one machine, and TF_CONFIG says that this process is a worker already. "
            "Leave out one of them."
        )
    _leave_with_the_launcher()
    # Before TensorFlow is used for anything else.
    strategy = join_workers(options.wait) if len(named) > 1 else None
    task = tasks.load(options.task)
    run = RunOptions(
        options.policy,
        options.strategy,
        options.steps,
        options.seed,
        learning_rate=task.learning_rate,
        batch_size=task.batch_size,
    )
    if options.workers > 1:
        if task.batch_size % options.workers:
            raise scaler.InvalidArgument(
                f"--workers {options.workers}: {options.task} has batches of {task.batch_size}, which cannot be "
                "divided equally among them."
            )
        launch(options.arguments, options.workers)
        return
    summary = train(
        task,
        run,
        options.out,
        lambda model: [progress(options.task)],
        checkpoint_every=options.checkpoint_every,
        resume=options.resume,
        changed=options.changed,
        trace_every=options.trace,
        strategy=strategy,
    )
    if strategy and strategy.cluster_resolver.task_id:
        return
    if options.json:
        print(to_json(summary))
    else:
        score = (
            f"accuracy {summary['accuracy']:.1%}"
            if "accuracy" in summary
            else f"perplexity {summary['perplexity']:.3f}"
        )
        print(
            f"{score}  loss {summary['final_loss']:.4g}  applied {summary['applied']}  "
            f"skipped {summary['skipped']}  loss scale {summary['loss_scale']:g}\n"
            f"weights {summary['weights_digest']}\nwrote {options.out}/summary.json"
        )


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


def _leave_with_the_launcher() -> None:
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
    from loops.support.errors import LoopError, WorkerLost

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
