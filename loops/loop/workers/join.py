"""Joins this process to the other workers of a cluster, within a time limit."""

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
"""How long workers wait for each other, in seconds."""
_EXAMPLE = '{"cluster": {"worker": ["10.0.0.1:4000", "10.0.0.2:4000"]}, "task": {"type": "worker", "index": 0}}'


def addresses() -> list[str]:
    """The workers in the environment variable TF_CONFIG, "host:port" each; none if it is not set.

    Raises:
        scaler.InvalidArgument: If it is not a cluster of workers with the index of this process.
    """
    text = os.environ.get("TF_CONFIG", "")
    return _read(text)[0] if text else []


def join_workers(seconds: float = SECONDS) -> tf.distribute.MultiWorkerMirroredStrategy:
    """The strategy of several processes, created once all of them are reachable, or an error within a time limit.

        strategy = loops.join_workers()  # Before anything else of TensorFlow.
        with strategy.scope():
            ...

    TensorFlow's own constructor waits silently for workers that never come. This function first opens this process's
    port, and waits until the port of each other worker accepts a connection.

    Args:
        seconds: How long to wait for the others, finite and above 0. If TensorFlow then cannot reach a peer that was
            just reachable, the process is ended after the same time again, with status 1 and a stack trace: no
            exception can be raised there.

    Raises:
        scaler.InvalidArgument: If TF_CONFIG is missing or wrong, or `seconds` is not a finite number above 0.
        WorkerLost: If another worker cannot be reached in this time; the message names it, and the reason.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise scaler.InvalidArgument(f"join_workers({seconds!r}): expected a finite number of seconds above 0.")
    workers, index = _read(os.environ.get("TF_CONFIG", ""))
    _wait(workers, index, float(seconds))
    with _ended_after(seconds):
        return tf.distribute.MultiWorkerMirroredStrategy()


def _read(text: str) -> tuple[list[str], int]:
    """The addresses of the workers, and the index of this process."""
    if not text:
        raise scaler.InvalidArgument(
            f"TF_CONFIG is not set: expected a cluster such as {_EXAMPLE} in each worker's environment."
        )
    try:
        found = json.loads(text)
        cluster, kind, index = found["cluster"], found["task"]["type"], found["task"]["index"]
    except (ValueError, KeyError, TypeError) as error:
        raise scaler.InvalidArgument(f"TF_CONFIG={text}: expected a cluster such as {_EXAMPLE}.") from error
    if not isinstance(cluster, dict) or set(cluster) != {"worker"} or kind != "worker":
        raise scaler.InvalidArgument(
            f"TF_CONFIG={text}: expected only tasks of the type 'worker', of which the first is the chief, such as "
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
    """Waits, with this worker's port open, until every other worker's port accepts a connection."""
    limit = time.monotonic() + seconds
    missing = dict.fromkeys(address for address in workers if address != workers[index])
    port = int(workers[index].rpartition(":")[2])
    try:
        own = socket.create_server(("", port))
    except OSError as error:
        raise WorkerLost(
            f"worker {index} cannot listen on port {port} ({error.strerror}): does an earlier run still use it? Wait "
            "for that run, or choose other ports in TF_CONFIG."
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
    # TensorFlow holds the GIL while it waits for its peers, so no Python thread could end this.
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
