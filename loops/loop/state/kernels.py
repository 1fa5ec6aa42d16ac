"""Operations of a step that may keep a state in their kernel: all stateful ones except those known to keep none.

TensorFlow calls an operation stateful if it keeps a state, reads a variable, prints, or must run once. The operations
listed here keep nothing from one call of the step to the next, or keep it in a variable, a table or an iterator, which
are saved. A warning names any other stateful operation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from loops.backend.steps import nodes, stateful
from loops.backend.versions import versions
from loops.loop.state.operations import OPERATIONS, Memory, kind

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
    return sorted({node.op for node in nodes(concrete) if node.op in _RANDOM and _draws(node)})


def caveats(concrete: tf.types.experimental.ConcreteFunction, called: Iterable[str] = ()) -> list[str]:
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


def _draws(node: Any) -> bool:
    return not node.op.startswith("CudnnRNN") or node.attr["dropout"].f > 0


def _keeps_none(op: str) -> bool:
    if op in _KEEP_NONE or op.startswith(_KEEP_NONE_BY_START):
        return True
    # A dataset made inside the step starts again with each step; `held` examines the captured ones.
    return OPERATIONS.get(str(kind(op)), Memory.FILES) is not Memory.FILES
