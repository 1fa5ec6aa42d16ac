"""Private properties of a step's optimizer and graph, and what XLA can compile of it.

    _model_variables_moving_average  an optimizer's averages of its weights   absent: scaler.UnsupportedVersion
    _trainable_variables             the weights that it averages             absent: scaler.UnsupportedVersion
    _learning_rate                   its schedule                             absent: a UserWarning: not checked
    _read_only_resource_inputs       what a call in a graph only reads        absent: a UserWarning: counts as moved
    framework.op_def_registry        operations with a state or effects       absent: every pass counts as having some,
                                                                              and a caveat of the run
    framework.kernels, framework.config, of them:
    get_registered_kernels_for_op    the kernels of an operation              absent: a step runs without XLA: slower,
                                                                              the same numbers but for last bits
    is_op_determinism_enabled        whether it is on                         absent: the same; a dataset's order counts
                                                                              as open, one more caveat
    ops.custom_gradient.record       hands a custom gradient to the tape      absent: they have no layer and no name
    call_preflattened                a call that looks at no argument         absent: a visit takes longer
    step_counter, dynamic_scale      of keras.optimizers.LossScaleOptimizer   absent: `Counters.known` is False

An absent name is noticed when a step is made or traced, before any weight moves.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend import versions

_CALLS = (
    *("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "Case", "StatelessCase"),
    *("While", "StatelessWhile"),
)
_PUT_BACK = (
    *("ReadVariable", "Assign", "Resource", "Var", "Rng"),
    *("StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal"),
)
"""Prefixes of the names of operations on variables, including those of random generators."""
_HARMLESS = (*_CALLS, "Assert", "Empty", "LookupTableFindV2", "LookupTableSizeV2")
_WITHIN = ("TensorArray", "Stack", "CudnnRNN")
"""Prefixes of the names of operations whose state lasts for one call."""
COUNTER, SCALE = "step_counter", "dynamic_scale"
"""The names in a graph of the variables that Keras's own scaler updates."""
_FOR_GPUS = "XLA_GPU_JIT"
_OF_EVERY_GRAPH = frozenset({"Placeholder", "NoOp"})


def averages(optimizer: Any) -> tuple[list, list] | None:
    """The averages of a Keras optimizer with `use_ema=True`, and the averaged weights; None before it is built.

    The average of a variable that takes its gradient as its value is None.

    Raises:
        scaler.UnsupportedVersion: If it is built, but does not have them under the tested names.
    """
    found = getattr(optimizer, "_model_variables_moving_average", None)
    trained = getattr(optimizer, "_trainable_variables", None)
    if found and trained and len(found) == len(trained):
        return list(found), list(trained)
    if not optimizer.built:
        return None
    raise scaler.UnsupportedVersion(
        f"Averaged: the optimizer {type(optimizer).__name__} of {versions()} keeps its averages in another place than "
        "the tested versions. Install a version that this package names in its metadata."
    )


def schedule(optimizer: Any) -> Any:
    """The learning rate or schedule of a Keras optimizer; None for any other optimizer.

    Warns if it is hidden.
    """
    if isinstance(optimizer, keras.optimizers.Optimizer) and not hasattr(optimizer, "_learning_rate"):
        warnings.warn(
            f"TrainStep: the optimizer {type(optimizer).__name__} of {versions()} does not show its learning rate: it "
            "was not checked whether a ByAttempts in it counts the attempts of this step's loss scaler.",
            UserWarning,
            stacklevel=5,
        )
    return getattr(optimizer, "_learning_rate", None)


def is_of_keras_scaler(variable: tf.Variable) -> bool:
    """Whether a variable has the name of one in a `keras.optimizers.LossScaleOptimizer` with its default name."""
    return "loss_scale_optimizer" in variable.name


def assigns(placeholder: tf.Tensor) -> bool:
    """Whether a graph may assign the variable with this handle.

    Warns if the graph does not say.
    """
    for operation in placeholder.consumers():
        if operation.type == "ReadVariableOp":
            continue
        # Calls, branches and loops list the inputs that they only read.
        listed = operation.node_def.attr.get("_read_only_resource_inputs")
        places = {place for place, value in enumerate(operation.inputs) if value is placeholder}
        if listed is None and operation.type in _CALLS:
            warnings.warn(
                f"{versions()} does not mark what a call in a graph only reads: a train step that multiplies by a loss "
                "scale and never updates it counts as attempting nothing.",
                UserWarning,
                stacklevel=4,
            )
        if listed is None or not places <= set(listed.list.i):
            return True
    return False


def call_as_traced(concrete: tf.types.experimental.ConcreteFunction, arguments: Any) -> Any:
    """Calls a traced function without checking that its arguments fit the trace. The caller has to know that they do.

    TensorFlow's check takes a fifth of a millisecond, which is longer than some steps. No tape records the call.
    """
    call = getattr(getattr(concrete, "inference_fn", None), "call_preflattened", None)
    if call is None:
        return concrete(*arguments)
    return call([*tf.nest.flatten(arguments, expand_composites=True), *concrete.captured_inputs])


def nodes(concrete: tf.types.experimental.ConcreteFunction) -> list[Any]:
    """The operations of a function, and of all functions that it calls, as `NodeDef`s."""
    graph = concrete.graph.as_graph_def()
    return [node for scope in (graph.node, *(one.node_def for one in graph.library.function)) for node in scope]


def kinds_of_operations(concrete: tf.types.experimental.ConcreteFunction) -> set[str]:
    """The kinds of operations of a function, and of all functions that it calls."""
    return {node.op for node in nodes(concrete)}


def stateful(kinds: set[str]) -> set[str] | None:
    """The kinds of operations with a state or an effect, according to TensorFlow; None if that is hidden."""
    try:
        from tensorflow.python.framework import op_def_registry
    except ImportError:
        return None
    known = {kind: op_def_registry.get(kind) for kind in kinds}
    return {kind for kind, definition in known.items() if definition is not None and definition.is_stateful}


def has_effects(concrete: tf.types.experimental.ConcreteFunction) -> bool:
    """Whether a function has effects besides variables: prints, reads of an iterator, random numbers of a kernel."""
    found = stateful(kinds_of_operations(concrete))
    if found is None:
        return True
    return any(kind not in _HARMLESS and not kind.startswith((*_PUT_BACK, *_WITHIN)) for kind in found)


def is_deterministic(if_unknown: bool = True) -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` was called: it also orders a dataset's operations."""
    try:
        from tensorflow.python.framework import config

        return bool(config.is_op_determinism_enabled())
    except (ImportError, AttributeError):
        return if_unknown


def not_for_xla(concrete: tf.types.experimental.ConcreteFunction) -> Sequence[str] | None:
    """The kinds of operations of a function that XLA has no kernel for; None if TensorFlow does not list kernels."""
    try:
        from tensorflow.python.framework import kernels

        listed = kernels.get_registered_kernels_for_op
    except (ImportError, AttributeError):
        return None
    with tf.device("CPU"):  # XLA registers its kernels at its first use.
        tf.function(tf.identity, jit_compile=True, autograph=False)(tf.constant(0.0))
    kinds = sorted(kinds_of_operations(concrete) - _OF_EVERY_GRAPH)
    return [kind for kind in kinds if _FOR_GPUS not in {one.device_type for one in listed(kind).kernel}]


@contextlib.contextmanager
def custom_gradients(change: Callable[[str, Callable], Callable]) -> Iterator[None]:
    """Within this context, changes the backward passes of functions with `tf.custom_gradient`.

    Args:
        change: Takes a function's name and its backward pass, and returns the backward pass to use.
    """
    try:
        from tensorflow.python.ops import custom_gradient

        record: Any = custom_gradient.record
        original = record.record_operation
    except (ImportError, AttributeError):
        yield
        return

    def recorded(name: str, outputs: Any, inputs: Any, backward: Callable, *rest: Any) -> Any:
        return original(name, outputs, inputs, change(name, backward), *rest)

    custom_gradient.record = types.SimpleNamespace(**{**vars(record), "record_operation": recorded})
    try:
        yield
    finally:
        custom_gradient.record = record
