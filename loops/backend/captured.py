"""The objects behind the handles that a function captured.

    _dataset         what an iterator reads                   absent: it is not saved, and a caveat of the run names it
    _ordering_token  orders the collective operations of one  absent: it is saved, and a run with another number of
                     replica; of CollectiveReplicaLauncher    replicas is refused
    cross_device_utils, of tensorflow.python, has that class  absent: the same

A function keeps only handles: their owners are found among all live Python objects. The kind of a resource is in the
handle's text; if it is not, the handle counts as every kind.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any

import tensorflow as tf

import scaler

VARIABLE = "tensorflow::Var"
TABLE = "tensorflow::lookup::LookupInterface"
TABLES = (tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable)
"""The tables that a step may write."""
_KEEPERS = (*TABLES, tf.lookup.StaticHashTable, tf.data.Iterator, tf.data.Dataset, tf.Variable)


def resource_type(handle: tf.Tensor) -> str | None:
    """TensorFlow's name for the kind of a resource; None if its text does not have it."""
    found = re.search(r'type="([^"]+)"', repr(handle))
    return found[1] if found else None


def is_iterator(handle: tf.Tensor) -> bool:
    """Whether a handle is that of an iterator, on one device or several."""
    kind = resource_type(handle)
    return kind is None or "Iterator" in kind


def is_dataset(handle: tf.Tensor) -> bool:
    """Whether a variant is that of a dataset."""
    return handle.dtype == tf.variant and "Dataset" in repr(handle)


def variables_by_handle(concrete: tf.types.experimental.ConcreteFunction, known: Container[int]) -> list[tf.Tensor]:
    """The handles of variables that a function uses directly, as with `tf.raw_ops`.

    Args:
        concrete: The function.
        known: The ids of the handles of `concrete.variables`.
    """
    handles = [one for one in concrete.captured_inputs if one.dtype == tf.resource and id(one) not in known]
    return [one for one in handles if resource_type(one) == VARIABLE]


def without_tokens(variables: Iterable[tf.Variable]) -> list[tf.Variable]:
    """The variables without those that order TensorFlow's collective operations: one for each replica, always 0."""
    found = list(variables)
    # They have no name, and each replica's device has one. All objects of the process are looked at only then.
    alike = [one for one in found if one.shape.rank == 0 and one.dtype == tf.float32 and one.name == "Variable:0"]
    if len({one.device for one in alike}) < 2:
        return found
    try:
        from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher

        launchers = scaler.authoring.alive(CollectiveReplicaLauncher)
        tokens = {id(getattr(one, "_ordering_token", None)) for objects in launchers for one in objects}
    except (ImportError, AttributeError):
        return found
    return [one for one in found if id(one) not in tokens]


def owners(handles: list[tf.Tensor]) -> dict[int, Any]:
    """The variable, table, iterator or dataset of each handle, by the handle's id, without those not found."""
    wanted = {id(handle) for handle in handles}
    found: dict[int, Any] = {}
    for objects in scaler.authoring.alive(*_KEEPERS) if wanted else ():
        for one in objects:
            for handle in _handles(one):
                # An iterator that was passed to a function is a second object, without a dataset.
                if id(handle) in wanted and (id(handle) not in found or dataset_of(one) is not None):
                    found[id(handle)] = one
        if len(found) == len(wanted):
            break
    return found


def dataset_of(iterator: Any) -> tf.data.Dataset | None:
    """The dataset that an iterator reads; None if it is hidden."""
    dataset = getattr(iterator, "_dataset", None)
    return dataset if isinstance(dataset, tf.data.Dataset) else None


def _handles(keeper: Any) -> list:
    """The handles of an object; none if it has none to show."""
    try:
        if isinstance(keeper, tf.data.Dataset):
            return [tf.data.experimental.to_variant(keeper)]
        if isinstance(keeper, tf.data.Iterator):
            return tf.nest.flatten(keeper, expand_composites=True)
        return [keeper.handle if isinstance(keeper, tf.Variable) else keeper.resource_handle]
    except Exception:  # Half constructed, of another graph, or on several replicas, whose components are found.
        return []
