"""How a process becomes one of several workers, or says why it cannot."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import socket
import time
from collections.abc import Iterator

import tensorflow as tf

import scaler
from loops.support.errors import WorkerLost

SECONDS = 300.0
"""How long workers wait for each other."""
_EXAMPLE = '{"cluster": {"worker": ["10.0.0.1:4000", "10.0.0.2:4000"]}, "task": {"type": "worker", "index": 0}}'


def addresses() -> list[str]:
    """The workers that the environment variable TF_CONFIG names, "host:port" each; none where it is not set.

    Raises:
        scaler.InvalidArgument: If it says something else than a cluster of workers and which of them this process is.
    """
    text = os.environ.get("TF_CONFIG", "")
    return _read(text)[0] if text else []


def join_workers(seconds: float = SECONDS) -> tf.distribute.MultiWorkerMirroredStrategy:
    """The strategy of several processes, made when all of them are there, or an error within a time limit.

        strategy = loops.join_workers()  # Before anything else of TensorFlow.
        with strategy.scope():
            ...

    TensorFlow's own constructor waits without a word for workers that never come. This one first waits, with this
    process's own port open, until each other worker's port takes a connection.

    Args:
        seconds: How long to wait for the others, finite and above 0. Should TensorFlow then not reach a peer that was
            there a moment ago, the process is ended after as long again, with status 1 and the place it hangs at: no
            exception can be raised there.

    Raises:
        scaler.InvalidArgument: If TF_CONFIG is missing or wrong, or `seconds` is no such number.
        WorkerLost: If another worker cannot be reached in this time; the message names which, and why.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise scaler.InvalidArgument(f"join_workers({seconds!r}): expected a finite number of seconds above 0.")
    workers, index = _read(os.environ.get("TF_CONFIG", ""))
    _wait(workers, index, float(seconds))
    with _ended_after(seconds):
        return tf.distribute.MultiWorkerMirroredStrategy()


def _read(text: str) -> tuple[list[str], int]:
    """Addresses of the workers, and which of them this process is."""
    if not text:
        raise scaler.InvalidArgument(f"TF_CONFIG is not set: expected such as {_EXAMPLE} in each worker's environment.")
    try:
        found = json.loads(text)
        cluster, kind, index = found["cluster"], found["task"]["type"], found["task"]["index"]
    except (ValueError, KeyError, TypeError) as error:
        raise scaler.InvalidArgument(f"TF_CONFIG={text}: expected such as {_EXAMPLE}.") from error
    if not isinstance(cluster, dict) or set(cluster) != {"worker"} or kind != "worker":
        raise scaler.InvalidArgument(
            f"TF_CONFIG={text}: expected tasks of the type 'worker' alone; the first of them is the chief. Such as "
            f"{_EXAMPLE}."
        )
    workers = cluster["worker"]
    if not isinstance(workers, list) or not workers or not all(map(_is_address, workers)):
        raise scaler.InvalidArgument(f'TF_CONFIG={text}: expected a list of workers, each "host:port".')
    if len(set(workers)) < len(workers):
        raise scaler.InvalidArgument(f"TF_CONFIG={text}: two workers have one address. Give each its own port.")
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(workers):
        raise scaler.InvalidArgument(
            f"TF_CONFIG={text}: task.index is {index!r}: expected an integer from 0 to {len(workers) - 1}, another for "
            "each process."
        )
    return workers, index


def _is_address(value: object) -> bool:
    if not isinstance(value, str):
        return False
    host, _, port = value.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


def _wait(workers: list[str], index: int, seconds: float) -> None:
    """Until every other worker's port takes a connection, while this one's does."""
    limit = time.monotonic() + seconds
    missing = dict.fromkeys(address for address in workers if address != workers[index])
    port = int(workers[index].rpartition(":")[2])
    try:
        own = socket.create_server(("", port))
    except OSError as error:
        raise WorkerLost(
            f"worker {index} cannot listen on port {port} ({error.strerror}): does a run use it that has not ended? "
            "Wait for that, or choose other ports in TF_CONFIG."
        ) from error
    with own:
        while True:
            for address in list(missing):
                host, _, number = address.rpartition(":")
                try:
                    socket.create_connection((host.strip("[]"), int(number)), timeout=2.0).close()
                except OSError as error:
                    missing[address] = error.strerror or str(error)
                else:
                    del missing[address]
            if not missing:
                return
            if time.monotonic() > limit:
                break
            time.sleep(0.1)
    who = "; ".join(f"worker {workers.index(address)} at {address}: {reason}" for address, reason in missing.items())
    raise WorkerLost(
        f"after {seconds:g} seconds worker {index} cannot reach {who}. Start the same command for every worker, with "
        "the same cluster in TF_CONFIG and another task.index, and let their ports through."
    )


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    # TensorFlow waits for its peers without letting another Python thread run.
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
