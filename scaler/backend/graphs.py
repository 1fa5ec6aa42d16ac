"""What is known about the graph that is being traced, and what is kept apart from it.

GraphOrParentsInXlaContext  whether XLA compiles it           absent: XLA is assumed: slower, the same numbers
multi_step_on_iterator      names Keras's loop over steps     absent: replicas fail there with TensorFlow's error
scratch_graph               names Keras's graph for shapes    absent: a layer that is built when it is first watched
shows nothing, which a warning says
capture_call_time_value     runs before each call             absent: its check runs only while tracing, and eager
steps do not see what functions scale between them
TrackableConstant           has a SavedModel hold a tensor    absent: TensorFlow refuses to save a module with a
function that calls a step whose name comes after its own
_add_scope_exit_callback    runs when a trace ends            absent: changes by the function itself are refused, too
_get_function               the functions that it calls       absent: they count as unknown: fewer mistakes are noticed
_watched_variables          the variables that it read        absent: BatchNorm's are known by their names alone,
and a missing rollback gives a warning
captures                    its captured tensors              absent: as `_get_function`
could_possibly_record       whether a tape records now        absent: no tape seems to record: a `loss_scale` that
multiplies the loss by hand counts as read for logging; a graph still recognises it, and eager mode refuses it once the
scale has moved
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from scaler.backend.autograph import nested
from scaler.backend.versions import say_once

BRANCHES = frozenset(["If", "StatelessIf", "Case", "StatelessCase"])
LOOPS = frozenset(["While", "StatelessWhile"])
CALLS = frozenset(["PartitionedCall", "StatefulPartitionedCall"]) | BRANCHES | LOOPS
"""The types of operations that call functions: calls, branches and loops."""
_IS_APART: contextvars.ContextVar[bool] = contextvars.ContextVar("is_apart", default=False)
"""Whether this is traced inside of what `apart` calls."""
_ACTS: weakref.WeakKeyDictionary[Any, dict[Hashable, Callable[[], None]]] = weakref.WeakKeyDictionary()
"""What runs before each call of a function, by its graph."""
_CHECKS: weakref.WeakKeyDictionary[Any, dict[Hashable, Callable[[], None]]] = weakref.WeakKeyDictionary()
"""The checks of `at_each_call`, by each graph that was being traced."""
_FUNCTIONS = ("f", "then_branch", "else_branch", "branches", "body")
_OPAQUE = frozenset(["OnesLike", "ZerosLike", "StopGradient", "Shape", "Sign"])
"""Neither a value nor its derivative passes through these."""
_PASS_BITS = frozenset(
    (
        *("Cast", "Bitcast", "Identity", "Placeholder", "SerializeTensor", "ParseTensor", "DecodeRaw"),
        *("Reshape", "Squeeze", "ExpandDims", "Transpose", "Pack", "Unpack", "ConcatV2", "Split", "SplitV", "Slice"),
        *("StridedSlice", "AddV2", "AddN", "Sub", "Mul", "Neg", "Sum", "ClipByValue", "Maximum", "Minimum"),
    )
)
"""Integers and bits of a gradient pass through these. All other integers are indices, counts and shapes."""
Node = tuple[Any, tuple]
"""A reference to a tensor, and the functions entered on the way to it, each as an operation and the graph it calls."""


def is_eager(tensor: Any) -> bool:
    """Whether a tensor is eager, with values that can be read now."""
    return hasattr(tensor, "numpy")


def in_xla(*, if_unknown: bool = True) -> bool:
    """Whether this is traced inside a function with `jit_compile=True`.

    Args:
        if_unknown: What to return if TensorFlow does not tell. Code for XLA works elsewhere, too, more slowly.
    """
    if tf.executing_eagerly():
        return False
    try:
        from tensorflow.python.ops import control_flow_util

        return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    except (ImportError, AttributeError):
        say_once(
            "does not tell whether XLA compiles a function: every function is traced as if it did. This is slower and "
            "gives the same numbers except for the last bits."
        )
        return if_unknown


def in_steps_of_fit() -> bool:
    """Whether this is traced inside the loop that Keras's `fit` makes for `steps_per_execution > 1`."""
    names = [getattr(graph, "name", "") for graph in graphs_around()]
    loops = [name for name in names if name.startswith(("while_body", "multi_step_on_iterator"))]
    return any(second.startswith("multi_step") and first.startswith("while_body") for first, second in pairwise(loops))


def in_a_branch() -> bool:
    """Whether this is traced inside of a branch of `tf.cond` or `tf.switch_case`."""
    return any(type(graph).__name__ == "CondBranchFuncGraph" for graph in graphs_around())


def asks_for_shapes() -> bool:
    """Whether Keras runs a layer only to learn the shapes of its outputs, as it does to build a model."""
    return any(str(getattr(graph, "name", "")).startswith("scratch_graph") for graph in graphs_around())


def graphs_around() -> list[Any]:
    """The graph that is being traced and those around it, the innermost first."""
    found, graph = [], tf.compat.v1.get_default_graph()
    while graph is not None:
        found.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return found


def at_each_call(look: Callable[[], Any], check: Callable[[Any], None], key: Hashable) -> None:
    """Calls `check(look())` now, and on the host before each later call of the functions that are being traced.

    An error from the check is raised by that call. No operation is added to the graph. The value at the end of a
    function's trace is the function's own doing and passes unchecked.

    Args:
        look: A function without arguments that returns a comparable value.
        check: A function of such a value.
        key: A graph keeps one check for each key.
    """
    check(look())
    left: list[Any] = []

    def act() -> None:
        now = look()
        if now not in left:
            check(now)

    graph = outermost_function()
    if graph is not None and _before_each_call(graph, act, key):
        for one in graphs_around():
            if type(one).__name__ == "FuncGraph":
                _CHECKS.setdefault(one, {})[key] = act
        with contextlib.suppress(AttributeError, RuntimeError):
            graph._add_scope_exit_callback(lambda: left.append(look()))


def repeat_checks(function: Any) -> None:
    """Makes the checks of a function's trace before each later call of the function that is being traced, too.

    Whoever calls a trace from a second function needs this: `at_each_call` knew the first one alone.

    Args:
        function: A concrete function.
    """
    graph = outermost_function()
    for key, act in _CHECKS.get(function.graph, {}).items() if graph is not None else ():
        _before_each_call(graph, act, key)


def before_each_call(act: Callable[[Any], None], key: Hashable) -> bool:
    """Calls `act(graph)` on the host before each later call of the outermost function that is being traced.

    Args:
        act: A function of the graph that is traced now. It runs while another function is traced, too, if that one
            calls this one.
        key: A graph keeps one such function for each key.

    Returns:
        Whether TensorFlow has a function for that.
    """
    graph = outermost_function()
    return graph is not None and _before_each_call(graph, functools.partial(act, graph), key)


def outermost_function() -> Any:
    """The graph of the outermost function that is being traced, or None."""
    # The host calls the outermost function alone. A function inside a loop would be asked once, while it is traced, and
    # under XLA its call then lacks the answer.
    if tf.executing_eagerly():
        return None
    for graph in reversed(graphs_around()):
        if type(graph).__name__ == "FuncGraph":
            return graph
    return None


def _before_each_call(graph: Any, act: Callable[[], None], key: Hashable) -> bool:
    """Returns whether TensorFlow has a function for that."""
    if not hasattr(graph, "capture_call_time_value"):
        return False
    acts = _ACTS.setdefault(graph, {})
    # TensorFlow takes longer over each function that it calls than that takes itself, so that one calls all.
    if not acts:
        nothing = _nothing()

        def called() -> tf.Tensor:
            for one in list(acts.values()):
                one()
            return nothing

        # A function of no tensors would do, were it not that `tf.while_loop` counts on one.
        spec = _AsGiven([], tf.bool)
        spec.acts = acts
        graph.capture_call_time_value(called, spec, key=("halfstep", id(acts)), default_value=nothing)
    acts.setdefault(key, act)
    return True


class _AsGiven(tf.TensorSpec):
    """Takes a tensor as it is. TensorFlow's own compares it at each call, which takes longer than all checks.

    Attributes:
        acts: What runs before each call. Where a branch calls the function, the outermost one makes them its own:
            TensorFlow passes them on by itself from a function and from a loop, and not from a branch.
    """

    acts: Mapping[Hashable, Callable[[], None]] = MappingProxyType({})

    def cast(self, value: tf.Tensor, casting_context: Any) -> tf.Tensor:
        graph = outermost_function()
        if graph is not None and graph is not tf.compat.v1.get_default_graph():
            for key, act in self.acts.items():
                _before_each_call(graph, act, key)
        return value

    def to_tensors(self, value: tf.Tensor) -> list[tf.Tensor]:
        return [value]


@functools.cache
def _nothing() -> tf.Tensor:
    """What every function with checks is given at each call."""
    with tf.init_scope():
        return tf.constant(False)


def saved_beside_functions() -> dict[str, Any]:
    """What a SavedModel needs for functions with checks, by a name: it holds what they are given."""
    try:
        from tensorflow.python.eager.polymorphic_function.saved_model_utils import TrackableConstant
    except ImportError:
        return {}
    return {"given_at_each_call": TrackableConstant(_nothing(), None)}


def functions_called(op: Any) -> list[Any]:
    """The graphs of the functions that an operation calls, as far as TensorFlow shows them."""
    if op.type not in CALLS:
        return []
    called = [op.get_attr(name) for name in _FUNCTIONS if name in op.node_def.attr]
    find = getattr(op.graph, "_get_function", lambda name: None)
    functions = [find(one.name) for value in called for one in (value if isinstance(value, list) else [value])]
    return [graph for graph in (getattr(function, "graph", None) for function in functions) if graph is not None]


def first_argument(op: Any) -> int:
    """The index of the input that becomes the first argument of the functions that an operation calls."""
    return 1 if op.type in BRANCHES else 0


def captured_from(placeholder: tf.Tensor) -> tf.Tensor | None:
    """The outer tensor that a function captured as this placeholder, or None if the placeholder is an argument."""
    for outer, inner in getattr(placeholder.graph, "captures", ()):
        if inner is placeholder:
            return outer
    return None


def variables_read(graph: Any) -> dict:
    """The variables that a graph has read so far, keyed by the tensors that represent them in it."""
    captured, read = {}, {}
    for outer, inner in getattr(graph, "captures", ()):
        captured[id(outer)] = inner
    for variable in getattr(graph, "_watched_variables", ()):
        inner = captured.get(id(getattr(variable, "handle", None)))
        if inner is not None:
            read[inner.ref()] = variable
    return read


def parameters(op: Any, index: int) -> Iterator[tuple[Any, tf.Tensor]]:
    """The functions that an operation calls, each with the parameter that receives the input at `index`."""
    place = index - first_argument(op)
    for body in functions_called(op):
        if 0 <= place < len(body.inputs):
            yield body, body.inputs[place]


def carries(tensor: tf.Tensor) -> bool:
    """Whether the value of a gradient may be in a tensor: of numbers, lists of tensors and some bits."""
    dtype = tensor.dtype
    if dtype.is_floating or dtype.is_complex or dtype == tf.variant:
        return True
    if is_eager(tensor) or not (dtype.is_integer or dtype == tf.string):
        return False
    return tensor.op.type in _PASS_BITS or tensor.op.type in CALLS


def upstream(tensors: Iterable[tf.Tensor], ends: Callable[[str], Any]) -> Iterator[tf.Tensor]:
    """Tensors and all that their values come from, also through functions, branches and loops.

    Args:
        tensors: Where to start.
        ends: Whether the walk ends at an operation of this type.
    """

    def sources(node: Node) -> list[Node]:
        here = node[0].deref()
        if is_eager(here) or here.op.type in _OPAQUE or ends(here.op.type):
            return []
        found = []
        for source in sources_of(here, node[1]):
            tensor = source[0].deref()
            if tensor.dtype.is_floating or carries(tensor):
                found.append(source)
        return found

    for node in reached([(tensor.ref(), ()) for tensor in tensors if carries(tensor)], sources):
        yield node[0].deref()


def sources_of(tensor: tf.Tensor, calls: tuple) -> list[Node]:
    """The tensors that a tensor of a graph is computed from. `calls` are the functions entered on the way to it."""
    op = tensor.op
    if op.type in CALLS:
        place = tensor.value_index
        bodies = [body for body in functions_called(op) if place < len(body.outputs)]
        return [(body.outputs[place].ref(), (*calls, (op, body))) for body in bodies]
    if op.type != "Placeholder":
        return [(source.ref(), calls) for source in op.inputs]
    if not calls:
        outer = captured_from(tensor)
        return [] if outer is None else [(outer.ref(), ())]
    op, body = calls[-1]
    place = next((place for place, own in enumerate(body.inputs) if own is tensor), None)
    if place is None:
        return []
    given, found = first_argument(op) + place, []
    if given < len(op.inputs):
        found.append((op.inputs[given].ref(), calls[:-1]))
    if op.type in LOOPS and place < len(body.outputs):
        found.append((body.outputs[place].ref(), calls))
    return found


def reached(start: Iterable[Any], sources: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Each node once that is reached from some others, as they are. Nodes are hashable, such as operations."""
    waiting, seen = list(start), set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += sources(node)


def counts_alone(tensor: Any) -> bool:
    """Whether a tensor of a graph is computed from constants and integer variables, such as counts, and from no data.

    Such a number is the same on every replica. For a tensor whose origin is not visible the answer is False.
    """
    waiting, seen = [tensor], set()
    while waiting:
        here: tf.Tensor | None = waiting.pop()
        while here is not None and not is_eager(here) and here.op.type == "Placeholder":
            here = captured_from(here)
        if here is None or is_eager(here):
            return False
        if here.op in seen:
            continue
        seen.add(here.op)
        if here.op.type == "ReadVariableOp":
            if not here.dtype.is_integer:
                return False
        elif here.op.op_def.is_stateful or here.op.type in CALLS:
            return False
        else:
            waiting += here.op.inputs
    return True


def opaque(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the same tensor behind an operation that TensorFlow does not look through.

    TensorFlow regroups products, on one replica differently from another. Use this for values that must not change.
    """
    return tf.ensure_shape(tensor, tensor.shape)


def meet(variables: Iterable[tf.Variable]) -> None:
    """Has the graph that is traced here, if any, meet variables in this order, whatever is read of them first.

    A checkpoint of a function's variables knows them by this order.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or tf.distribute.has_strategy() or not hasattr(graph, "capture"):
        return
    for variable in variables:
        graph.capture(variable.handle)


def call_noninlined(function: Callable, *tensors: Any) -> Any:
    """Calls `function(*tensors)` as a function that the surrounding graph does not inline.

    It is for a branch that few steps take. TensorFlow visits every inlined operation, even of a branch not taken.
    Inside of such a function another one would only take time to trace: there it is called as it is.
    """
    if _IS_APART.get():
        return function(*tensors)

    def inside(*arguments: Any) -> Any:
        before = _IS_APART.set(True)
        try:
            return function(*arguments)
        finally:
            _IS_APART.reset(before)

    return traced_once(inside)(*tensors)


def traced_once(function: Callable) -> Callable:
    """`function` as one that the surrounding graph does not inline, so that a second call adds one operation."""
    if tf.executing_eagerly() or in_xla():
        return function
    return nested(function, experimental_attributes={"_noinline": True})


def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU. What is traced then is for one, wherever it is placed."""
    return bool(tf.config.list_physical_devices("GPU"))


def tape_records() -> bool:
    """Whether a `tf.GradientTape` records the computations of this call. False if TensorFlow does not tell."""
    try:
        from tensorflow.python.eager import record

        return bool(record.could_possibly_record())
    except (ImportError, AttributeError):
        return False
