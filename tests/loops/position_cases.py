"""Pipelines, and what a resumed run sees of each beside the run that it goes on from."""

import numpy as np
import tensorflow as tf

from loops.loop.state.position import Position, handle_of, serialized

CUTS = (12, 17)
"""Late enough that what TensorFlow forgets of a pipeline of `test_operations` nearly always shows at one of them."""
END = 30


def numbers(count=10):
    return tf.data.Dataset.range(count)


def generated(count):
    return tf.data.Dataset.from_generator(lambda: iter(range(count)), output_signature=tf.TensorSpec([], tf.int64))


def shuffled(**seeds):
    return numbers().shuffle(10, **(seeds or {"seed": 1}))


def take(iterator, count):
    """The next batches, as plain values; fewer where it ends."""
    return [plain(batch) for _, batch in zip(range(count), iterator, strict=False)]


def plain(batch):
    batch = tf.sparse.to_dense(batch) if isinstance(batch, tf.SparseTensor) else batch
    if isinstance(batch, tf.RaggedTensor):
        return batch.to_list()
    return [np.asarray(part).tolist() for part in tf.nest.flatten(batch)]


def unconverted(make):
    """The same without AutoGraph, which takes longer to read the functions of a pipeline than TensorFlow to trace."""
    return tf.autograph.experimental.do_not_convert(make)


def restore(iterator, value):
    """As a checkpoint does it, without a file: that would take longer than all else."""
    tf.raw_ops.DeserializeIterator(resource_handle=handle_of(iterator), serialized=value)


def forgotten(make, cuts=range(1, 20), end=END):
    """The first cut at which an iterator that TensorFlow saved does not go on as the run does, or None."""
    make = unconverted(make)
    dataset = make()
    whole, iterator, taken = take(iter(make()), end), iter(dataset), 0
    for cut in cuts:
        take(iterator, cut - taken)
        taken = cut
        restored = iter(make())
        restore(restored, serialized(iterator, dataset))
        if take(restored, end - cut) != whole[cut:]:
            return cut
    return None


def resumed(make, cuts=CUTS, end=END):
    """At which cuts a resumed run sees what the run saw, and what it is told: as a loop with a checkpoint does it."""
    make = unconverted(make)
    first = Position(make())
    first.probe()
    caveats, whole, written = first.caveats, [], {}
    for cut in cuts:
        whole += take(first.iterator, cut - len(whole))
        if not first.problem:
            written[cut] = serialized(first.iterator, first.dataset)
    whole += take(first.iterator, end - len(whole))
    assert len(whole) == end
    second = Position(make())
    if first.problem:
        second.skip_to(cuts[-1])
        return {cuts[-1]: take(second.iterator, end - cuts[-1]) == whole[cuts[-1] :]}, caveats
    second.probe()
    assert second.caveats == caveats
    found = {}
    for cut in cuts:
        restore(second.iterator, written[cut])
        found[cut] = take(second.iterator, end - cut) == whole[cut:]
    return found, caveats


def with_options(dataset, **values):
    options = tf.data.Options()
    for name, value in values.items():
        setattr(options, name, value)
    return dataset.with_options(options)
