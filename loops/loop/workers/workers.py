"""The processes that hold the replicas of a strategy, and how they exchange values between calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

import scaler
from loops.support.errors import WorkerLost


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
            if self.count == 1 or not _is_of_a_peer(error):
                raise
            reason = " ".join(error.message.split())
            raise WorkerLost(
                f"worker {self.index} waits for another of the {self.count} workers, which is gone or does not answer: "
                "its own output says why. Start all of them again; with a Checkpoint that resumes (on the command "
                f"line --resume) they go on from what all have saved. TensorFlow says: {_shortened(reason)}"
            ) from error

    def _sum_over_replicas(self, rows: tf.Tensor) -> tf.Tensor:
        assert self._strategy is not None

        def replica(value: tf.Tensor) -> tf.Tensor:
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value))

        return self._strategy.experimental_local_results(self._strategy.run(replica, args=(rows,)))[0]


def _index(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> int:
    chiefs = resolver.cluster_spec().as_dict().get("chief", ())
    return int(resolver.task_id) + (len(chiefs) if resolver.task_type == "worker" else 0)


def _is_of_a_peer(error: tf.errors.OpError) -> bool:
    return isinstance(error, tf.errors.UnavailableError) or "Collective ops is aborted" in error.message


def _shortened(reason: str) -> str:
    start = max(reason.find("Collective ops is aborted by: "), 0)
    return reason[start : start + 200]
