"""Which replica's share of the batch makes a step go wrong.

A share is taken by itself where every replica is given the same one: the mean over the replicas is then that of one.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from loops.diagnose.explain.attempts import Attempt, Attempts


def at_share_to_blame(moment: Any, attempts: Attempts, attempt: Attempt) -> tuple[tuple[int, ...], Attempt]:
    """Has each replica take, in the place of its own, the first share that by itself does what the step did.

    Args:
        moment: On several replicas. Its batches become that share, for every replica.
        attempts: Of it.
        attempt: What the step did.

    Returns:
        The replicas whose shares do, and the attempt with the first; where no share does, what was given.
    """
    count = moment.replicas
    alone = [attempts.as_run(_repeated(moment.batch, replica, count)) for replica in range(count)]
    # A scale may be too high for every share, in a step that one share alone gave a NaN.
    alike = tuple(replica for replica, one in enumerate(alone) if not one.finite and one.cause is attempt.cause)
    bad = alike or tuple(replica for replica, one in enumerate(alone) if not one.finite)
    if not bad:
        return (), attempt
    moment.batch = _repeated(moment.batch, bad[0], count)
    if moment.next_batch is not None:
        moment.next_batch = _repeated(moment.next_batch, bad[0], count)
    return bad, alone[bad[0]]


def in_whole_batch(example: int | None, batch: Any, replicas: tuple[int, ...] | None, count: int) -> int | None:
    """The position in the batch of an example of the first of these replicas' share.

    Args:
        example: Its position in the share, or None.
        batch: The share, as often as there are replicas.
        replicas: As from `at_share_to_blame`; None on one device.
        count: Of replicas.
    """
    if example is None or not replicas:
        return example
    return example + replicas[0] * (len(tf.nest.flatten(batch)[0]) // count)


def _repeated(batch: Any, replica: int, count: int) -> Any:
    def part(tensor: tf.Tensor) -> tf.Tensor:
        own = len(tensor) // count
        return tf.concat([tensor[replica * own : (replica + 1) * own]] * count, axis=0)

    return tf.nest.map_structure(part, batch)
