"""What a step holds outside of variables in objects of TensorFlow: tables and iterators, which can be saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from loops.backend import captured
from loops.backend.steps import kinds_of_operations
from loops.backend.versions import versions
from loops.loop.state.pipeline import look, operations_called, redrawing
from loops.loop.state.position import handle_of, refusal, serialized, unlike

_WRITE_TABLES = {"LookupTableImportV2", "LookupTableInsertV2", "LookupTableRemoveV2"}
_EXPORTS = "LookupTableExportV2"
_CALL_ITERATORS = {"IteratorGetNext", "IteratorGetNextAsOptional", "IteratorGetNextSync"}


@dataclasses.dataclass(frozen=True)
class StepResources:
    """The tables and iterators of a step.

    Attributes:
        tables: `MutableHashTable` and `DenseHashTable`, in the order of the trace.
        iterators: Those whose position can be saved.
        caveats: What a resumed run loses of the others, one sentence per loss.
        called: The kinds of operations in functions of the datasets that the step starts.
    """

    tables: list[Any]
    iterators: list[tf.data.Iterator]
    caveats: list[str]
    called: frozenset[str] = frozenset()

    @property
    def saved(self) -> list[Any]:
        """The objects to give to `tf.train.Checkpoint`."""
        return [*self.tables, *self.iterators]

    @property
    def described(self) -> list[str]:
        """A description of each saved object, the same in every process."""
        tables = [f"{type(one).__name__}({one.key_dtype.name}, {one.value_dtype.name})" for one in self.tables]
        return [*tables, *("Iterator" for _ in self.iterators)]

    def snapshot(self) -> Callable[[], None]:
        """Copies all contents and positions into memory, and returns a function that restores them."""
        # A DenseHashTable exports the memory that it goes on writing, and keeps the memory it imports: copy both.
        contents = [(table, [np.array(part) for part in table.export()]) for table in self.tables]
        positions = [(handle_of(one), serialized(one, captured.dataset_of(one))) for one in self.iterators]

        def restore() -> None:
            for table, parts in contents:
                keys, values = (tf.constant(part.copy()) for part in parts)
                tf.raw_ops.LookupTableImportV2(table_handle=table.resource_handle, keys=keys, values=values)
            for handle, position in positions:
                tf.raw_ops.DeserializeIterator(resource_handle=handle, serialized=position)

        return restore


def resources_of(concrete: tf.types.experimental.ConcreteFunction) -> StepResources:
    """Finds the tables and iterators that a step's concrete function captured."""
    kinds = kinds_of_operations(concrete)
    handles = [one for one in concrete.captured_inputs if one.dtype == tf.resource]
    tables = [one for one in handles if captured.resource_type(one) in (captured.TABLE, None)]
    iterators = [one for one in handles if captured.is_iterator(one)]
    datasets = [one for one in concrete.captured_inputs if captured.is_dataset(one)]
    owner_of = captured.owners([*tables, *iterators, *datasets])
    owners = list({id(one): one for handle in (*tables, *iterators) if (one := owner_of.get(id(handle)))}.values())
    found = [one for one in owners if isinstance(one, captured.TABLES)]
    caveats = _of_tables(found, any(id(one) not in owner_of for one in tables), kinds)
    savable = []
    for iterator in (one for one in owners if isinstance(one, tf.data.Iterator)):
        saved, lost = _of_iterator(iterator)
        caveats += [f"an iterator that the train step calls: {sentence}" for sentence in lost]
        savable += [iterator] if saved else []
    if kinds & _CALL_ITERATORS and any(id(one) not in owner_of for one in iterators):
        caveats.append(
            "the train step calls an iterator that cannot be saved, since it is not one of tf.data.Dataset: a resumed "
            "run starts it again. Take its batches from the loop's dataset to lose nothing."
        )
    read = [owner_of[id(one)] for one in datasets if isinstance(owner_of.get(id(one)), tf.data.Dataset)]
    caveats += [sentence for dataset in read for sentence in _of_dataset(dataset)]
    if len(read) < len(datasets):
        caveats.append(
            "the train step starts a dataset whose object cannot be found, so it is unknown whether it draws other "
            "random numbers each time. Call one iterator of it to lose nothing."
        )
    called = frozenset().union(*(operations_called(dataset) for dataset in read))
    return StepResources(found, savable, list(dict.fromkeys(caveats)), called)


def _of_tables(found: list, unknown: bool, kinds: set[str]) -> list[str]:
    caveats = []
    if unknown and kinds & _WRITE_TABLES:
        caveats.append(
            "the train step writes a table that cannot be saved, since it is neither a "
            "tf.lookup.experimental.MutableHashTable nor a DenseHashTable: a resumed run starts it again. Use one of "
            "them to lose nothing."
        )
    if found and _EXPORTS in kinds:
        caveats.append(
            "the train step exports a table (LookupTableExportV2): a resumed run has its keys and values in another "
            "order, so that sums over them differ in the last bits. Sort the keys first to lose nothing."
        )
    return caveats


def _of_iterator(iterator: tf.data.Iterator) -> tuple[bool, list[str]]:
    """Whether its position can be saved, and what a resumed run loses of it, one sentence per loss."""
    dataset = captured.dataset_of(iterator)
    if dataset is None:
        return False, [f"{versions()} hides its dataset, so it is not saved. A resumed run starts it again."]
    findings = look(dataset)
    problem = findings.problem or refusal(iterator, dataset)
    lost = unlike(findings, skipping=bool(problem))
    if problem:
        lost.insert(0, f"its position cannot be saved: {problem}. A resumed run starts it again.")
    return not problem, lost


def _of_dataset(dataset: tf.data.Dataset) -> list[str]:
    names = redrawing(dataset)
    if not names:
        return []
    return [
        f"the train step reads a dataset that draws other random numbers each time it starts ({', '.join(names)}), "
        "which cannot be saved. Shuffle with reshuffle_each_iteration=False, or call one iterator of it, to lose "
        "nothing."
    ]
