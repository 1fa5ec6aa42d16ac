"""Whether XLA compiles a loop's step with `jit_compile="auto"`: by device, dtypes and step, never by a timing.

A step that XLA compiles on a CPU lacks errors for indices and labels outside of their range: XLA takes another row, or
computes NaN. So a loop that chose XLA by itself looks at them in the batch, before the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

import scaler
from loops.backend.datasets import inputs
from loops.backend.steps import is_deterministic, kinds_of_operations, not_for_xla
from loops.loop.state.operations import kind
from loops.support.batches import INDEX, LABEL

COMPILED = (
    "XLA compiles this step, since it computes in 16 bits on a CPU, which is slower in a graph. "
    "Loop(jit_compile=False) leaves it as a graph."
)
"""What a run says, once, where the loop chose XLA by itself on a CPU."""


class StepFunction:
    """A train step as a `tf.function`, which XLA compiles or not.

    Args:
        train_step: Any callable from a batch to a dict of tensors.
        jit_compile: Whether XLA is to compile it.
        is_open: Whether that is the loop's choice: then it is final only once the step is traced.

    Attributes:
        function: The function.
        jit_compile: Whether XLA compiles it.
        is_open: Whether that may still change.
        has_chosen: Whether the loop chose XLA on a CPU by itself, where it must not change what the step does.
        is_tried: Whether a call has shown that XLA takes the step.
        said: What was chosen that makes a call longer, as sentences.
    """

    function: tf.types.experimental.PolymorphicFunction

    def __init__(self, train_step: Callable, jit_compile: bool, is_open: bool):
        self._train_step, self.jit_compile, self.is_open = train_step, jit_compile, is_open
        self.has_chosen = self.is_tried = False
        self.said: list[str] = []

    def make(self, jit_compile: bool) -> None:
        """Forgets what was traced."""
        self.jit_compile = jit_compile
        self.function = tf.function(self._train_step, jit_compile=jit_compile or None)

    def traced(self, batch: Any) -> tf.types.experimental.ConcreteFunction:
        """The concrete function: without XLA if the choice was left open and XLA cannot compile the step."""
        with warnings.catch_warnings():
            if self.tries_xla:  # It will be seen whether it does.
                warnings.filterwarnings("ignore", "XLA may refuse to compile", scaler.ScaleWarning)
            if self.is_open and self.jit_compile and not can_be_compiled(self.function, batch):
                self.make(False)
        if self.is_open and self.jit_compile and not has_gpu():
            self.said.append(COMPILED)
            self.has_chosen = True
        self.is_open = False
        return self.function.get_concrete_function(batch)

    @property
    def tries_xla(self) -> bool:
        """Whether the loop chose XLA on a CPU by itself, and no call has shown yet that XLA takes the step."""
        return not self.is_tried and (self.has_chosen or (self.is_open and self.jit_compile and not has_gpu()))

    def unchoose(self) -> None:
        """Takes the loop's choice back, since XLA refuses the step."""
        self.has_chosen = False
        self.said.remove(COMPILED)


def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU."""
    return bool(tf.config.get_visible_devices("GPU"))


_OTHERWISE = ("Assert", "CheckNumerics", "Random", "TruncatedNormal", "Multinomial", "ParameterizedTruncatedNormal")
"""How the names of operations begin that XLA leaves out, and of those whose seed is a counter of the process there."""


def has_steady_rows(dataset: tf.data.Dataset | None) -> bool:
    """Whether all batches of a dataset but the last one have as many rows, as far as its operations tell.

    A source that is no dataset counts as if they had: the loop sees its batches.
    """
    while dataset is not None and kind(type(dataset).__name__) in _KEEP_ROWS and len(inputs(dataset)) == 1:
        (dataset,) = inputs(dataset)
    return dataset is None or kind(type(dataset).__name__) in _BATCH


_BATCH = ("Batch", "ParallelBatch", "MapAndBatch")
_KEEP_ROWS = ("Repeat", "Prefetch", "Take", "Skip", "Cache", "Shuffle", "Options", "Shard", "Finalize", "Model")


def may_compile(
    strategy: tf.distribute.Strategy | None, models: Iterable[Any], element_spec: Any, steady_rows: bool = True
) -> bool:
    """Whether XLA should compile the step, as far as is known before the step is traced.

    On a GPU the rule is that of Keras's `fit`: not under a `tf.distribute` strategy, not with deterministic operations,
    and not with a layer whose `supports_jit` is False. On a CPU a layer must also compute in 16 bits, and batches must
    have one shape but for the rows of the last one, since XLA compiles a step for each shape.

    Args:
        strategy: A `tf.distribute` strategy whose replicas take the step, or None.
        models: Those of the step, as far as they are known.
        element_spec: The dataset's.
        steady_rows: From `has_steady_rows`.
    """
    layers = [layer for model in models for layer in scaler.observe.layers_of(model)]
    if strategy is not None or is_deterministic():
        return False
    if not has_gpu() and not (_compute_in_16_bits(layers) and _has_one_shape(element_spec, steady_rows)):
        return False
    without = next((layer for layer in layers if not getattr(layer, "supports_jit", True)), None)
    if without is not None:
        _warn(f"its layer {without.name!r} says so (supports_jit=False)")
    return without is None


def _compute_in_16_bits(layers: Iterable[Any]) -> bool:
    # One that is not built yet may get weights.
    weighs = (layer for layer in layers if layer.variables or not layer.built)
    return any(layer.compute_dtype in ("float16", "bfloat16") for layer in weighs)


def _has_one_shape(element_spec: Any, steady_rows: bool) -> bool:
    specs = tf.nest.flatten(element_spec)
    if not all(isinstance(one, tf.TensorSpec) for one in specs):
        return False
    return all((one.shape[1:] if steady_rows else one.shape).is_fully_defined() for one in specs)


def can_be_compiled(step: tf.types.experimental.PolymorphicFunction, batch: Any) -> bool:
    """Whether XLA has a kernel for all operations of a step. What it refuses all the same shows in the first call.

    On a CPU the loop chooses XLA by itself, so XLA must not change what the step does. It would leave out assertions,
    read another row for an index outside of its range, and draw other numbers from the same seed when a program makes
    the step again. It would also compile again for each size that depends on values.

    Args:
        step: Has `jit_compile=True`.
        batch: One, or its specification.
    """
    try:
        concrete = step.get_concrete_function(batch)
        without = not_for_xla(concrete)
    except Exception:  # Of any kind: if the step itself is wrong, its next trace raises it again.
        if has_gpu():
            raise
        return False
    if without is None:
        _warn("this release of TensorFlow does not list the kernels of an operation")
    elif without:
        _warn(f"it has no kernel for {', '.join(without)}")
    elif not has_gpu():
        left_out = [one for one in kinds_of_operations(concrete) if one.startswith(_OTHERWISE)]
        return not left_out and not _has_sizes_of_data(concrete) and looked_up(concrete) is not None
    return without is not None and not without


def _warn(why: str) -> None:
    """Says that a step is not compiled, on a GPU: on a CPU that is what one expects."""
    if has_gpu():
        warnings.warn(
            f"Loop: XLA cannot compile this step, since {why}. It runs without XLA. Pass jit_compile=False if this is "
            "intended.",
            UserWarning,
            stacklevel=4,
        )


_SIZES = ("Shape", "ShapeN", "Size", "Rank")
"""Operations whose result depends on no value of the batch."""
_LOOKUPS = {"GatherV2": INDEX, "ResourceGather": INDEX, "SparseSoftmaxCrossEntropyWithLogits": LABEL}
"""Operations of which the second input has to be in the range of the first, and what is said of one that is not."""
_STEPS = frozenset(
    (
        *("Identity", "Cast", "Reshape", "ExpandDims", "Squeeze", "EnsureShape", "Const", "Pack", "StridedSlice"),
        *("SelectV2", "Less", "AddV2", *_SIZES),
    )
)
"""Operations between a part of the batch and the indices: Keras adds the number of rows to negative ones."""


class Looked(NamedTuple):
    """A part of the batch that holds indices.

    Attributes:
        place: Which part, of the batch without its structure.
        rows: How many rows there are.
        may_be_negative: Whether -1 is the last one.
        message: What is said of one that is not there.
    """

    place: int
    rows: int
    may_be_negative: bool
    message: str


def upstream(tensor: tf.Tensor) -> Iterator[Any]:
    """The operations that a tensor is computed from, in its own graph, without what only its sizes come from."""
    waiting, seen = [tensor.op], set()
    while waiting:
        op = waiting.pop()
        if op not in seen:
            seen.add(op)
            yield op
            waiting += [] if op.type in _SIZES else [one.op for one in op.inputs]


def looked_up(concrete: tf.types.experimental.ConcreteFunction) -> Sequence[Looked] | None:
    """The parts of a batch that a step uses as indices.

    Returns:
        None if it uses others, of which nothing is known before it runs.
    """
    if _is_looked_up_inside(concrete):
        return None
    arguments = {one.op: place for place, one in enumerate(_arguments(concrete))}
    found, updated = [], set()
    for op in concrete.graph.get_operations():
        if op.type not in _LOOKUPS:
            continue
        behind = list(upstream(op.inputs[1]))
        places = [arguments[one] for one in behind if one in arguments]
        if not places and all(one.type != "Placeholder" for one in behind):
            continue  # Places in a sequence, and the like.
        if len(places) != 1 or any(one.type not in _STEPS for one in behind if one not in arguments):
            if op.type == "GatherV2" and not _is_of_weights(op):
                continue  # Indices that are computed are those of what they are computed from.
            return None
        if op.type == "ResourceGather":
            updated.add(places[0])  # An optimizer's update of the rows that the forward pass has read.
            continue
        rows = _rows(op)
        if rows is None:
            return None
        negative = any(one.type == "SelectV2" for one in behind)
        found.append(Looked(places[0], rows, negative, _LOOKUPS[op.type]))
    return found if updated <= {one.place for one in found} else None


def _is_looked_up_inside(concrete: tf.types.experimental.ConcreteFunction) -> bool:
    """Whether a function that the step calls looks something up: its indices are not traced to the batch."""
    for function in concrete.graph.as_graph_def().library.function:
        nodes = {one.name: one for one in function.node_def}
        for one in nodes.values():
            if one.op in _LOOKUPS and one.op != "GatherV2":
                return True
            rows = one
            while rows is not None and rows.op in ("GatherV2", "Identity", "Cast"):
                rows = nodes.get(rows.input[0].split(":")[0])
                if one.op == "GatherV2" and rows is not None and rows.op == "ReadVariableOp":
                    return True
    return False


def _arguments(concrete: tf.types.experimental.ConcreteFunction) -> Sequence[tf.Tensor]:
    return concrete.graph.inputs[: len(concrete.graph.inputs) - len(concrete.captured_inputs)]


def _is_of_weights(op: Any) -> bool:
    """Whether the rows are those of a variable."""
    rows = op.inputs[0].op
    while rows.type in ("Identity", "Cast"):
        rows = rows.inputs[0].op
    return rows.type == "ReadVariableOp"


def _rows(op: Any) -> int | None:
    """The number of rows, or of classes; None if it is not known."""
    if op.type == "GatherV2":
        axis = tf.get_static_value(op.inputs[2])
        return None if axis is None else op.inputs[0].shape[int(axis)]
    return op.inputs[0].shape[-1]


def _has_sizes_of_data(concrete: tf.types.experimental.ConcreteFunction) -> bool:
    """Whether a size inside of a step depends on values: XLA would compile the step again for each."""
    data = {one.op for one in _arguments(concrete)}
    for op in concrete.graph.get_operations():
        for place in _MADE_BY.get(op.type, ()):
            if any(one in data or one.type == "ReadVariableOp" for one in upstream(op.inputs[place])):
                return True
    return False


_MADE_BY = {
    **{kind: (1,) for kind in ("Reshape", "Tile", "BroadcastTo", "OneHot", "Pad", "PadV2", "MirrorPad")},
    **{"Fill": (0,), "Range": (0, 1, 2), "Slice": (1, 2), "StridedSlice": (1, 2, 3), "LinSpace": (2,)},
}
"""The inputs that tell the shape of the result."""


def checks(looked: Sequence[Looked], batch: Any) -> list[tf.Operation]:
    """Assertions that indices are in their range, for a step to wait for.

    Args:
        looked: From `looked_up`.
        batch: The batch.
    """
    parts, found = tf.nest.flatten(batch), []
    for one in looked:
        values = tf.cast(parts[one.place], tf.int64)
        least, most = tf.reduce_min(values), tf.reduce_max(values)
        fits = most < one.rows
        said = tf.strings.format(one.message.format(value="{}", rows=one.rows), tf.where(fits, least, most))
        found.append(tf.debugging.Assert(fits & (least >= (-one.rows if one.may_be_negative else 0)), [said]))
    return [one for one in found if one is not None]
