"""Finds state of layers that a forward pass moved, such as BatchNorm's statistics, in the graph that is being traced.

The rule looks at variables that a Keras layer holds, and at those named `moving_...`, as Keras names BatchNorm's. If
this graph assigns one, it moved in the forward pass of the next applied step. The first value read since the last
`apply` is its value before the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.assignments import assigned_by
from scaler.backend.graphs import CALLS, graphs_around, is_eager, parameters, reached, variables_read
from scaler.backend.layers import layers_of, owners_of
from scaler.backend.variables import is_of_a_scaler
from scaler.errors import ScaleWarning

_STEPS = "_halfstep_steps"
_SHORT = re.compile(r"(^|_)bn($|_|\d)")


@dataclasses.dataclass
class Moved:
    """A variable that moved.

    Attributes:
        variable: A statistic, or another state of a layer.
        before: Its value before the forward pass, or None if nobody read it.
        users: The scalers that decided about it, by id.
        fresh: Whether it moved after the last `apply`.
    """

    variable: tf.Variable
    before: tf.Tensor | None
    users: set = dataclasses.field(default_factory=set)
    fresh: bool = True


@dataclasses.dataclass
class _Steps:
    """What is known about a graph up to operation `position`, and whether it holds an `apply`."""

    position: int = 0
    applied: bool = False
    reads: dict = dataclasses.field(default_factory=dict)
    assigned: dict = dataclasses.field(default_factory=dict)
    is_state: dict = dataclasses.field(default_factory=dict)

    @property
    def moved(self) -> list[Moved]:
        """The state of layers among what was assigned."""
        new = [one.variable for ref, one in self.assigned.items() if ref not in self.is_state]
        owners = owners_of(one for one in new if not (_is_statistic(one) or is_of_a_scaler(one)))
        for ref, one in self.assigned.items():
            self.is_state.setdefault(ref, _is_statistic(one.variable) or id(one.variable) in owners)
        return [one for ref, one in self.assigned.items() if self.is_state[ref]]


def before_apply(
    variables: Sequence, grads: Sequence, user: object, when: bool | None
) -> tuple[list[Moved], str | None]:
    """Finds the statistics to roll back if there is no snapshot, and names one that cannot be rolled back.

    If only the running step knows `when`, the start of an accumulation window is unknown, and a statistic is named.

    Args:
        variables: The model's variables to update.
        grads: Their gradients.
        user: The scaler that decides.
        when: Whether it decides now, or None if only the running step knows.
    """
    if when is not None and not when:
        return [], None
    if tf.executing_eagerly():
        return [], likely(variables)
    graph = tf.compat.v1.get_default_graph()
    if replicas.replica_count() > 1:
        # All replicas share one graph.
        fresh = (one.variable for one in _look(graph).moved if one.fresh)
        return [], next((one.name for one in fresh if one.dtype.is_floating), None) or likely(variables)
    moved = moved_before(variables, grads, user)
    # A seed that moved does no harm.
    lost = [one for one in moved if (one.before is None or when is None) and one.variable.dtype.is_floating]
    known = [one for one in moved if one.before is not None and when is not None]
    if lost:
        return known, lost[0].variable.name
    # Without statistics here the forward pass is in another graph.
    return known, None if moved or _statistics(graph) else likely(variables)


def moved_before(targets: Iterable, grads: Sequence, user: object) -> list[Moved]:
    """The statistics that moved before this `apply` and that no earlier `apply` of the same user decided about.

    Statistics count if their layer is updated. Those that no earlier `apply` decided about also count if the gradients
    depend on their layer, or if the layer has no weights to tell by. If neither kind exists, all statistics count.

    Args:
        targets: The model's variables to update.
        grads: Their gradients.
        user: The scaler that decides.
    """
    graph = tf.compat.v1.get_default_graph()
    steps = _look(graph)
    moved = [one for one in steps.moved if id(user) not in one.users]
    if not moved:
        return []
    layers = {_layer(target) for target in targets}
    own = [one for one in moved if _layer(one.variable) in layers]
    state = {ref for ref, is_state in steps.is_state.items() if is_state} | set(_statistics(graph))
    weights = {ref: _layer(variable) for ref, variable in variables_read(graph).items() if ref not in state}
    elsewhere = set(weights.values()) - {weights[ref] for ref in _variables_behind(grads) & set(weights)}
    used = [one for one in moved if not one.users and _layer(one.variable) not in layers | elsewhere]
    for one in own if own + used else moved:
        one.users.add(id(user))
    return own + used or moved


def _variables_behind(grads: Sequence) -> set:
    """References to the handles of variables that gradients depend on in any way, also through masks."""
    parts = tf.nest.flatten([grad for grad in grads if tf.is_tensor(grad)], expand_composites=True)
    found: set = set()

    def sources(op: Any) -> list:
        found.update([source.ref() for source in op.inputs if source.dtype == tf.resource])
        return [source.op for source in op.inputs if source.dtype != tf.resource]

    for _ in reached([part.op for part in parts if not is_eager(part)], sources):
        pass
    return found


def likely(variables: Iterable) -> str | None:
    """The first of these variables that seems to be BatchNorm's, by its path. Outside a graph nothing else is known."""
    paths = (getattr(variable, "path", "").split("/") for variable in variables)
    return next(("/".join(path) for path in paths if _is_batch_norm(path)), None)


def begins() -> None:
    """Records that an `apply` begins: what it assigns itself is no forward pass."""
    for graph in () if tf.executing_eagerly() else graphs_around():
        _look(graph)


def decided() -> None:
    """Records a complete `apply`: what follows in this graph and those around it belongs to the next step."""
    for graph in graphs_around():
        steps = _steps(graph)
        steps.applied, steps.reads, steps.position = True, {}, len(graph.get_operations())
        for one in steps.assigned.values():
            one.fresh = False


@contextlib.contextmanager
def no_forward_pass() -> Iterator[None]:
    """What is traced within this context moves statistics after a step's decision, as an average of weights does.

    Enter it once for all replicas, which trace one graph in turns.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    steps = _look(graph)
    yield
    steps.position = len(graph.get_operations())


def warn_if_late(variables: Sequence) -> None:
    """Warns about a snapshot of state that moved already since the last `apply` in this graph."""
    if not variables or tf.executing_eagerly() or replicas.replica_count() > 1:
        return
    graph = tf.compat.v1.get_default_graph()
    steps, asked = _look(graph), {id(replicas.native(variable)) for variable in variables}
    fresh = any(one.fresh and id(one.variable) in asked for one in steps.assigned.values())
    late = [one for one in (steps.moved if fresh else ()) if one.fresh and id(one.variable) in asked]
    if late:
        name = late[0].variable.name.split(":")[0]
        warnings.warn(
            f"snapshot(variables): a forward pass moved {name!r} before this snapshot, which now holds the very values "
            "that a skipped step must undo: take the snapshot before the forward pass.",
            ScaleWarning,
            stacklevel=4,
        )


def sentence(name: str) -> str:
    """The warning for statistics that moved and cannot be rolled back."""
    return (
        f"apply(grads): without rollback, a skipped step leaves BatchNorm's statistics and other state of layers "
        f"({name.split(':')[0]!r}) as the forward pass moved them, and one bad batch makes them NaN forever. Pass "
        "rollback=hs.snapshot("
        "model.non_trainable_variables), taken before the forward pass, or hs.snapshot([]) if they do not move."
    )


def _look(graph: Any) -> _Steps:
    """Updates what is known about a graph with the operations added since the last call."""
    steps = _steps(graph)
    operations = graph.get_operations()
    new = operations[steps.position :]
    steps.position = len(operations)
    assigned: dict[Any, list] = {}
    for op, source in assigned_by(new):
        assigned.setdefault(op, []).append(source)
    read = variables_read(graph) if assigned else {}
    for op in new:
        if op.type == "ReadVariableOp":
            steps.reads.setdefault(op.inputs[0].ref(), op.outputs[0])
        for source in assigned.get(op, ()):
            variable, known = read.get(source.ref()), steps.assigned.get(source.ref())
            if variable is not None and (known is None or not known.fresh) and _assigns(op, source):
                steps.assigned[source.ref()] = Moved(variable, steps.reads.get(source.ref()))
    return steps


def _steps(graph: Any) -> _Steps:
    steps = getattr(graph, _STEPS, None) or _Steps()
    setattr(graph, _STEPS, steps)
    return steps


def _assigns(op: Any, handle: tf.Tensor) -> bool:
    """Whether an operation that may assign a variable does, directly or in a function that it calls.

    Functions that hold an `apply` do not count: that `apply` decided about what they moved.
    """
    if op.type not in CALLS:
        return op.type.startswith("Assign")
    places = [place for place, source in enumerate(op.inputs) if source is handle]
    return any(
        _assigns(inner, own)
        for place in places
        for body, own in parameters(op, place)
        if not getattr(getattr(body, _STEPS, None), "applied", False)
        for inner, source in assigned_by(own.consumers())
        if source is own
    )


def _statistics(graph: Any) -> dict:
    """The variables that the rule applies to, keyed by the tensors that represent them in the graph."""
    return {ref: variable for ref, variable in variables_read(graph).items() if _is_statistic(variable)}


def _is_statistic(variable: Any) -> bool:
    return variable.name.rsplit("/", 1)[-1].startswith("moving_")


def _is_batch_norm(path: Sequence[str]) -> bool:
    """Whether this is the path of a BatchNorm variable, by the names in Keras and its bundled models."""
    layers = [part.lower() for part in path[:-1]]
    if any("batch_norm" in layer or "batchnorm" in layer for layer in layers):
        return True
    return path[-1] in ("gamma", "beta") and any(_SHORT.search(layer) for layer in layers)


def _layer(variable: Any) -> str:
    return replicas.native(variable).name.rpartition("/")[0]


def warn_of_narrow_statistics(model: keras.layers.Layer) -> None:
    """Warns of a BatchNormalization with 16-bit statistics, since inference may then differ from training."""
    layers = [one for one in layers_of(model) if isinstance(one, keras.layers.BatchNormalization) and one.built]
    # Those of a frozen layer do not move.
    narrow = [one for one in layers if one.trainable and one.moving_mean.dtype in ("float16", "bfloat16")]
    if narrow:
        dtype, others = narrow[0].moving_mean.dtype, f", and {len(narrow) - 1} more" if len(narrow) > 1 else ""
        warnings.warn(
            f"BatchNormalization {narrow[0].path!r}{others}: its moving statistics are {dtype}. Small updates are "
            "rounded away, and a variance beyond the range is dropped: inference may differ from training. Give the "
            f"layer dtype='mixed_{dtype}' (on the command line --policy mixed_{dtype}), which keeps them in float32.",
            ScaleWarning,
            stacklevel=2,
        )
