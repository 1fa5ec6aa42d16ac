"""What a step holds outside of variables: tables and iterators, which can be saved, and the state of kernels.

TensorFlow calls an operation stateful if it keeps a state, reads a variable, prints, or must run once. The operations
listed here keep nothing from one call of the step to the next, or keep it in a variable, a table or an iterator, which
are saved. A warning names any other stateful operation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from loops.backend import captured, versions
from loops.backend.steps import kinds_of_operations, nodes, stateful
from loops.loop.state.operations import OPERATIONS, Memory, kind
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


_KEEPS_NONE = """
    Case If RemoteCall StatefulPartitionedCall While
    Assert CheckNumerics CheckNumericsV2 DebugIdentityV2 DebugIdentityV3 DeepCopy DeviceIndex Empty GuaranteeConst
    Print PrintV2 StatelessRandomGetAlg Timestamp
    AssignAddVariableOp AssignSubVariableOp AssignVariableOp AssignVariableXlaConcatND DestroyResourceOp
    DisableCopyOnRead ReadVariableOp ReadVariableXlaSplitND ResourceCountUpTo ResourceGather ResourceGatherNd
    ResourceStridedSliceAssign VarIsInitializedOp VariableShape
    RngReadAndSkip RngSkip StatefulRandomBinomial StatefulStandardNormal StatefulStandardNormalV2
    StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt StatefulUniformInt
    AnonymousHashTable AnonymousMutableDenseHashTable AnonymousMutableHashTable AnonymousMutableHashTableOfTensors
    HashTable HashTableV2 InitializeTableFromDataset InitializeTableFromTextFileV2 InitializeTableV2 LookupTableExportV2
    LookupTableFindV2 LookupTableImportV2 LookupTableInsertV2 LookupTableRemoveV2 LookupTableSizeV2
    AnonymousIterator AnonymousIteratorV2 AnonymousIteratorV3 AnonymousMemoryCache AnonymousMultiDeviceIterator
    AnonymousMultiDeviceIteratorV3 AnonymousRandomSeedGenerator AnonymousSeedGenerator DatasetToSingleElement
    DeleteIterator DeleteMemoryCache DeleteMultiDeviceIterator DeleteRandomSeedGenerator DeleteSeedGenerator
    DummyIterationCounter DummyMemoryCache DummySeedGenerator IteratorGetDevice IteratorGetNext
    IteratorGetNextAsOptional IteratorGetNextSync MakeIterator MultiDeviceIteratorGetNextFromShard
    MultiDeviceIteratorInit ReduceDataset
    AllCandidateSampler AllToAll ConsumeMutexLock CrossReplicaSum MutexLock Recv Send SyncDevice TemporaryVariable
    CloseSummaryWriter CreateSummaryFileWriter FlushSummaryWriter ImportEvent SummaryWriter WriteAudioSummary
    WriteGraphSummary WriteHistogramSummary WriteImageSummary WriteRawProtoSummary WriteScalarSummary WriteSummary
    """
_KEEP_NONE = frozenset(_KEEPS_NONE.split())
_KEEP_NONE_BY_START = (
    *("Collective", "Nccl", "ResourceApply", "ResourceScatter", "ResourceSparseApply"),
    *("CudnnRNN", "Stack", "TensorArray"),
)
_CANDIDATES = {
    *("FixedUnigramCandidateSampler", "LearnedUnigramCandidateSampler", "LogUniformCandidateSampler"),
    *("ThreadUnsafeUnigramCandidateSampler", "UniformCandidateSampler"),
}
_BOXES = {"SampleDistortedBoundingBox", "SampleDistortedBoundingBoxV2"}
_NUMBERS = {
    *("Multinomial", "NonDeterministicInts", "ParameterizedTruncatedNormal", "RandomCrop", "RandomGamma"),
    *("RandomPoisson", "RandomPoissonV2", "RandomShuffle", "RandomStandardNormal", "RandomUniform", "RandomUniformInt"),
    "TruncatedNormal",
}
_DRAW = {
    "Draw the candidates with a tf.random.Generator, and pass them as sampled_values": _CANDIDATES,
    "Use tf.image.stateless_sample_distorted_bounding_box": _BOXES,
    "Use a tf.random.Generator or a keras.random.SeedGenerator": _NUMBERS,
    "Set its dropout to 0, and drop with keras.layers.Dropout": {"CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"},
}
"""Operations that keep their position in their kernel, by what to use instead."""
_RANDOM = set().union(*_DRAW.values())
PYTHON = {"EagerPyFunc", "PyFunc"}
"""Operations that call Python."""


def unsaved_random_operations(concrete: tf.types.experimental.ConcreteFunction) -> list[str]:
    """The kinds of random operations in a step whose position cannot be saved.

    Args:
        concrete: The step's concrete function.
    """
    drawing = (node for node in nodes(concrete) if node.op in _RANDOM)
    return sorted({one.op for one in drawing if not one.op.startswith("CudnnRNN") or one.attr["dropout"].f > 0})


def caveats_of_kernels(concrete: tf.types.experimental.ConcreteFunction, called: Iterable[str] = ()) -> list[str]:
    """What a resumed run loses because of a step's operations, one sentence per kind of loss.

    Args:
        concrete: The step's concrete function.
        called: The kinds of operations in functions of the datasets that the step starts.
    """
    random = unsaved_random_operations(concrete)
    found = []
    for remedy, kinds in _DRAW.items():
        if own := [kind for kind in random if kind in kinds]:
            found.append(
                f"the train step draws random numbers with {', '.join(own)}, whose position cannot be saved. {remedy} "
                "to lose nothing."
            )
    known = stateful({*called, *(node.op for node in nodes(concrete))})
    if known is None:
        found.append(
            f"{versions()} does not say which operations of the train step have a state, so it is unknown what a "
            "resumed run loses. Compare a resumed run with an uninterrupted one."
        )
    others = _others(known or ())
    if python := sorted(others & PYTHON):
        found.append(
            f"the train step calls Python ({', '.join(python)}): its state is not saved, except for the global "
            "generators of random and numpy.random. If it keeps anything else, such as a counter or its own "
            "generator, a resumed run starts that again. Keep it in a tf.Variable to lose nothing."
        )
    if unknown := sorted(others - PYTHON):
        found.append(
            f"the train step uses {', '.join(unknown)}, which may keep a state outside of variables: it is not saved, "
            "and a resumed run starts it again. Keep it in a tf.Variable or a tf.lookup.experimental.MutableHashTable "
            "to lose nothing."
        )
    return found


def kept_elsewhere(concrete: tf.types.experimental.ConcreteFunction, called: Iterable[str] = ()) -> list[str]:
    """The kinds of a step's operations, but for random ones, that may keep a state outside of variables.

    Args:
        concrete: The step's concrete function.
        called: The kinds of operations in functions of the datasets that the step starts.
    """
    return sorted(_others(stateful({*called, *(node.op for node in nodes(concrete))}) or ()))


def _others(known: Iterable[str]) -> set[str]:
    return {op for op in known if not _keeps_none(op)} - _RANDOM


def _keeps_none(op: str) -> bool:
    if op in _KEEP_NONE or op.startswith(_KEEP_NONE_BY_START):
        return True
    # A dataset made inside the step starts again with each step; `held` examines the captured ones.
    return OPERATIONS.get(str(kind(op)), Memory.FILES) is not Memory.FILES
