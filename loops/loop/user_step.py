"""What a `Loop` is given: what it refuses, and the user's step as it calls it, on every replica with its share."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Set
from typing import Any

import tensorflow as tf

import scaler
from loops.loop.calls import TrainStepFunction
from loops.support.batches import UNEVEN
from loops.support.errors import check, check_count


def taking_batches(train_step: TrainStepFunction, element_spec: Any) -> TrainStepFunction:
    """The step as a function of one batch.

    A step that needs one argument gets the batch. One that needs several, such as `step(x, y)`, gets the parts of a
    batch that is a tuple.

    Args:
        train_step: Any callable.
        element_spec: The dataset's.

    Raises:
        scaler.InvalidArgument: If it needs more arguments than a batch has parts, or fewer.
    """
    try:
        parameters = list(inspect.signature(train_step).parameters.values())
    except (TypeError, ValueError):
        return train_step
    places = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [one.name for one in places if one.default is one.empty]
    by_name = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
    any_number = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if not by_name and len(needed) < 2 and (places or any_number):
        return train_step
    parts = len(element_spec) if isinstance(element_spec, tuple) else 1
    if not by_name and 2 <= len(needed) <= parts and (any_number or parts <= len(places)):

        def step(batch: Any) -> Any:
            return train_step(*batch)

        return step
    raise scaler.InvalidArgument(
        f"Loop(train_step): it needs the arguments ({', '.join([*needed, *by_name])}), but a batch of the dataset has "
        f"{parts} part{'s' * (parts != 1)}: expected a function of the batch, or one of as many arguments as a batch "
        "has parts, such as step(x, y) for pairs."
    )


LARGEST = ("amax", "attention_logit")
"""The names of outputs that are reduced over replicas by the maximum."""


def replicate(train_step: TrainStepFunction, strategy: tf.distribute.Strategy) -> TrainStepFunction:
    """A step that takes a global batch, splits it evenly, runs on every replica and reduces their outputs.

    On several workers each reads the same global batches and takes its own shares, so that the position in the data is
    one number. Floating-point outputs are averaged over the replicas, except that arrays named "amax" or
    "attention_logit", or so of a part as "critic/amax", are reduced by the maximum, which is NaN if one replica's value
    is. Arrays of integers are counts, and summed. Other scalars, such as the decision that all replicas share, and
    arrays of bools are taken from the first replica.

    Args:
        train_step: A step to run in replica context.
        strategy: Any strategy for synchronous training.
    """
    if strategy.num_replicas_in_sync == 1:
        return lambda batch: strategy.run(train_step, args=(batch,))

    def step(batch: Any) -> dict[str, tf.Tensor]:
        outputs = strategy.run(train_step, args=(_shares(strategy, batch),))
        return {name: _join(strategy, name, value) for name, value in outputs.items()}

    return step


def check_batches(element_spec: Any, strategy: tf.distribute.Strategy) -> None:
    """Refuses batches of a known size that cannot be split evenly.

    Raises:
        scaler.InvalidArgument: If the size is not a multiple of the number of replicas.
    """
    replicas = strategy.num_replicas_in_sync
    for spec in tf.nest.flatten(element_spec):
        size = spec.shape[0] if spec.shape.rank else None
        if size is not None and size % replicas:
            raise scaler.InvalidArgument(
                f"Loop(dataset): batches of {size} for {replicas} replicas: expected a multiple of {replicas}, since "
                "each replica takes an equal share."
            )


def _shares(strategy: tf.distribute.Strategy, batch: Any) -> Any:
    replicas = strategy.num_replicas_in_sync

    def share(context: Any) -> Any:
        def part(tensor: tf.Tensor) -> tf.Tensor:
            size = tf.shape(tensor)[0]
            even = tf.debugging.assert_equal(size % replicas, 0, message=UNEVEN.format(replicas=replicas))
            # An error during the replicas' first collective operation would break all later ones in this process.
            with tf.control_dependencies([] if even is None else [even]):
                own = size // replicas
            start = context.replica_id_in_sync_group * own
            return tensor[start : start + own]

        return tf.nest.map_structure(part, batch)

    return strategy.experimental_distribute_values_from_function(share)


def _join(strategy: tf.distribute.Strategy, name: str, value: Any) -> tf.Tensor:
    first = strategy.experimental_local_results(value)[0]
    if first.dtype.is_floating and first.shape.rank and name.rpartition("/")[2] in LARGEST:
        return _largest(strategy, value, first.shape)
    if first.dtype.is_floating:
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, value, axis=None)
    if first.dtype.is_integer and first.shape.rank:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)
    return first


def _largest(strategy: tf.distribute.Strategy, value: Any, shape: tf.TensorShape) -> tf.Tensor:
    """The maximum over the replicas of all workers; NaN if one of them is, which `tf.reduce_max` may lose."""
    rows = tf.reshape(strategy.gather(value, axis=0), [strategy.num_replicas_in_sync, *shape])
    nan = tf.reduce_any(tf.math.is_nan(rows), axis=0)
    return tf.where(nan, tf.constant(float("nan"), rows.dtype), tf.reduce_max(rows, axis=0))


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
    # What has a shape is data, and not batches of it.
    is_source = isinstance(dataset, Iterable) and not isinstance(dataset, _NO_SOURCES) and not hasattr(dataset, "shape")
    if not isinstance(dataset, tf.data.Dataset) and not is_source:
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
        check(f"Loop(actions=[{action!r}])", scaler.authoring.takes_one(action), "callables that take a Visit")


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
