"""What a `Loop` refuses when it is made, rather than at its first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import tensorflow as tf

import scaler
from loops.support.checks import check, check_count

_NO_SOURCES = (
    *(str, bytes, Mapping, Set, list, tuple, range),
    *(tf.data.Iterator, tf.distribute.DistributedDataset, tf.distribute.DistributedIterator),
)
"""What can be iterated over, but gives no batches, or not those of every replica."""


def check_arguments(
    train_step: object, dataset: object, steps_per_call: object, strategy: object, actions: list, jit_compile: object
) -> None:
    """Refuses arguments of the wrong kind, and a loop in a strategy's scope, where its counts become replicated."""
    around = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() and not isinstance(around, tf.distribute.OneDeviceStrategy):
        raise scaler.InvalidArgument(
            f"Loop(...) was made inside of {type(around).__name__}.scope(): expected it outside. Make the model, the "
            "optimizer, the loss scaler and the train step in the scope, and then, after the `with` block, "
            "Loop(step, dataset, strategy=strategy)."
        )
    check(f"Loop(train_step={train_step!r})", callable(train_step), "a callable that takes a batch")
    if not isinstance(dataset, tf.data.Dataset) and not _is_source(dataset):
        raise scaler.InvalidArgument(
            f"Loop(dataset={type(dataset).__name__}): expected a tf.data.Dataset, or an iterator or a loader of "
            "batches. Arrays become a dataset with tf.data.Dataset.from_tensor_slices((x, y)).batch(64)."
        )
    if steps_per_call is not None:
        check_count(f"steps_per_call={steps_per_call!r}", steps_per_call)
    compiles = isinstance(jit_compile, bool) or jit_compile == "auto"
    check(f"Loop(jit_compile={jit_compile!r})", compiles, 'True, False or "auto"')
    if strategy is not None:
        _check_strategy(strategy, jit_compile is True)
    for action in actions:
        if isinstance(action, type):
            raise scaler.InvalidArgument(
                f"Loop(actions=[{action.__name__}]): expected an action, and this is its class: {action.__name__}(...)."
            )
        check(f"Loop(actions=[{action!r}])", callable(action), "callables that take a Visit")


def _is_source(data: object) -> bool:
    # What has a shape is data, and not batches of it.
    return isinstance(data, Iterable) and not isinstance(data, _NO_SOURCES) and not hasattr(data, "shape")


def _check_strategy(strategy: object, jit_compile: bool) -> None:
    """Refuses what is no strategy or keeps weights elsewhere, and a step XLA cannot compile for several replicas."""
    if not isinstance(strategy, tf.distribute.Strategy):
        raise scaler.InvalidArgument(f"Loop(strategy={strategy!r}): expected a tf.distribute.Strategy, or None.")
    several = strategy.num_replicas_in_sync > 1
    central = several and isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy)
    if central or isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise scaler.InvalidArgument(
            f"Loop(strategy={type(strategy).__name__}): it keeps one copy of the weights for all devices, and every "
            "replica of a Loop needs its own. Use tf.distribute.MirroredStrategy or MultiWorkerMirroredStrategy."
        )
    if jit_compile and several:
        raise scaler.InvalidArgument(
            f"Loop(jit_compile=True) on {strategy.num_replicas_in_sync} replicas: XLA cannot compile a step that "
            "synchronizes replicas. Compile the part that each replica runs alone: TrainStep(..., jit_compile=True)."
        )
