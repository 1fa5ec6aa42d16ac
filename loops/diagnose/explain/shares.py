"""Finds the replica whose share of the batch makes a step fail.

A share is tried alone by giving it to every replica: the mean over the replicas is then that of the share.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from loops.diagnose.explain.attempts import Attempt, Attempts


def at_share_to_blame(moment: Any, attempts: Attempts, attempt: Attempt) -> tuple[tuple[int, ...], Attempt]:
    """Finds the shares that make the step fail alone, and gives the first of them to every replica.

    Args:
        moment: A run on several replicas. Its batches are replaced by that share, repeated for every replica.
        attempts: The attempts at the step.
        attempt: The attempt with the whole batch.

    Returns:
        The replicas whose shares fail alone, and the attempt with the first share; without any, the given attempt.
    """
    count = moment.replicas
    alone = [attempts.as_run(_repeated(moment.batch, replica, count)) for replica in range(count)]
    # One share may cause a NaN while the scale is too high for every share: those with the step's own cause count.
    alike = tuple(replica for replica, one in enumerate(alone) if not one.finite and one.cause is attempt.cause)
    bad = alike or tuple(replica for replica, one in enumerate(alone) if not one.finite)
    if not bad:
        return (), attempt
    moment.batch = _repeated(moment.batch, bad[0], count)
    if moment.next_batch is not None:
        moment.next_batch = _repeated(moment.next_batch, bad[0], count)
    return bad, alone[bad[0]]


def in_whole_batch(example: int | None, batch: Any, replicas: tuple[int, ...] | None, count: int) -> int | None:
    """The position in the whole batch of an example in the share of the first of these replicas.

    Args:
        example: The position in the share, or None.
        batch: The share, repeated for every replica.
        replicas: The replicas whose shares fail, from `at_share_to_blame`; None on one device.
        count: The number of replicas.
    """
    if example is None or not replicas:
        return example
    return example + replicas[0] * (len(tf.nest.flatten(batch)[0]) // count)


def _repeated(batch: Any, replica: int, count: int) -> Any:
    def part(tensor: tf.Tensor) -> tf.Tensor:
        own = len(tensor) // count
        return tf.concat([tensor[replica * own : (replica + 1) * own]] * count, axis=0)

    return tf.nest.map_structure(part, batch)
