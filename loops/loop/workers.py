"""The processes that hold the replicas of a strategy, and how they exchange values between calls.

Workers exchange errors, signals and stops between two calls.

Joins this process to the other workers of a cluster, within a time limit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

import scaler
from loops.support.errors import WorkerLost
from loops.support.signals import Deferred


class Workers:
    """The workers of a strategy. A single process is one worker, and exchanges nothing.

    Attributes:
        count: The number of workers.
        index: The index of this process, from 0.
    """

    def __init__(self, strategy: tf.distribute.Strategy | None):
        self._strategy = strategy
        replicas = strategy.num_replicas_in_sync if strategy else 1
        # TensorFlow's default strategy has no devices to count.
        self._own_replicas = len(strategy.extended.worker_devices) if strategy and replicas > 1 else 1
        self.count = replicas // self._own_replicas
        self.index = _index(strategy.cluster_resolver) if strategy and self.count > 1 else 0
        self._sum = tf.function(self._sum_over_replicas)

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """The values of every worker, one list per worker. All workers must call this, with equally many values.

        Raises:
            WorkerLost: If a worker no longer answers.
        """
        if self.count == 1:
            return [list(values)]
        rows = [list(values) if worker == self.index else [0] * len(values) for worker in range(self.count)]
        with self.lost_is_an_error():
            return (self._sum(tf.constant(rows, tf.int64)) // self._own_replicas).numpy().tolist()

    @contextlib.contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Makes an error on one worker end all of them. The body must not wait for other workers.

        Args:
            what: What the body does, for the message of the other workers: "cannot {what}".

        Raises:
            WorkerLost: If only other workers had an error.
        """
        own = None
        try:
            yield
        except scaler.ScalerError as error:
            own = error
        try:
            failed = [worker for worker, (one,) in enumerate(self.gather([own is not None])) if one]
        finally:
            if own:
                raise own
        if failed:
            raise WorkerLost(
                f"worker {failed[0]} cannot {what}, so worker {self.index} stops, too: the output of worker "
                f"{failed[0]} says why."
            )

    @contextlib.contextmanager
    def lost_is_an_error(self) -> Iterator[None]:
        """Replaces TensorFlow's long error about a lost worker.

        Raises:
            WorkerLost: If TensorFlow raised an error because of another worker.
        """
        try:
            yield
        except tf.errors.OpError as error:
            aborted = "Collective ops is aborted"
            if self.count == 1 or not (isinstance(error, tf.errors.UnavailableError) or aborted in error.message):
                raise
            reason = " ".join(error.message.split())
            start = max(reason.find(f"{aborted} by: "), 0)
            raise WorkerLost(
                f"worker {self.index} waits for another of the {self.count} workers, which is gone or does not answer: "
                "its own output says why. Start all of them again; with a Checkpoint that resumes (on the command "
                f"line --resume) they go on from what all have saved. TensorFlow says: {reason[start : start + 200]}"
            ) from error

    def _sum_over_replicas(self, rows: tf.Tensor) -> tf.Tensor:
        assert self._strategy is not None

        def replica(value: tf.Tensor) -> tf.Tensor:
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value))

        return self._strategy.experimental_local_results(self._strategy.run(replica, args=(rows,)))[0]


def _index(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> int:
    chiefs = resolver.cluster_spec().as_dict().get("chief", ())
    return int(resolver.task_id) + (len(chiefs) if resolver.task_type == "worker" else 0)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def meet(
    workers: Workers, signals: Deferred, error: Exception | None, *, stopped: bool, step: Callable[[], int]
) -> int | None:
    """Makes an error, a signal or a stop on one worker take effect on all of them at the same step.

    Args:
        workers: All workers.
        signals: Those that this worker received; the others' signals are added.
        error: What an action raised here, or None.
        stopped: Whether an action here ends the run.
        step: Returns the current step; called only for a message.

    Returns:
        The first worker with an action that ends the run, or None.

    Raises:
        Exception: The error, if there is one, once the others know.
        WorkerLost: If another worker has stopped with an error.
    """
    happened = [error is not None, stopped, *(number in signals.received for number in _SIGNALS)]
    try:
        gathered = workers.gather([int(one) for one in happened])
    finally:
        if error:
            raise error
    stopped_by: int | None = None
    for worker, (failed, stops, *received) in enumerate(gathered):
        if failed:
            raise WorkerLost(
                f"worker {worker} stopped with an error after step {step()}, so worker {workers.index} stops, too: the "
                f"output of worker {worker} says why. Start all of them again to go on from what all have saved."
            )
        stopped_by = worker if stops and stopped_by is None else stopped_by
        signals.received += [
            number for number, one in zip(_SIGNALS, received, strict=True) if one and number not in signals.received
        ]
    return stopped_by


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
