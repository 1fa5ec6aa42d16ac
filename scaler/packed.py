"""Slots and masters of small variables in one buffer for each kind, so that an update touches few variables.

With hundreds of small variables a step costs what its variables cost to look up, whatever is computed. Momenta,
velocities and other slots are the optimizer's alone between two steps, and so are master weights. So they lie in one
flat buffer a kind while steps are taken, and go back to where they are kept as soon as anybody asks: to print, assign,
save or restore one, or to run the optimizer by hand. The model's own weights are read and written where they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from scaler import gradients, replicas
from scaler.graphs import apart
from scaler.joining import Joined, flat, join
from scaler.masters import MasterWeights
from scaler.movable import MovableVariable, is_free, make_movable
from scaler.optimizers import Optimizer

_ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Lion,
    keras.optimizers.Ftrl,
)
"""Their `update_step` treats every element by itself, so it may be given many variables as one."""
_LARGEST = 2**14
"""Elements of a variable above which moving them costs as much as what is saved."""
_FEWEST = 32
"""Variables below which a step does not feel them."""
_ATTRIBUTE = "_scaler_packed"


def pack(
    optimizer: Optimizer, grads: Sequence[gradients.Gradient], targets: Sequence, masters: MasterWeights | None
) -> None:
    """Has the slots of small variables kept in buffers from now on, if there are enough of them.

    And the variables themselves, if they are masters that no function was traced with.

    Args:
        optimizer: Its updates are compiled, and it was built just now: nobody has traced a function that reads or
            assigns its slots.
        grads: Of any floating dtype.
        targets: A variable for each.
        masters: Those that the targets are, or None.
    """
    if type(optimizer) not in _ELEMENTWISE or optimizer.use_ema:
        return
    small = [v for grad, v in zip(grads, targets, strict=True) if not isinstance(grad, tf.IndexedSlices) and _small(v)]
    names = _slot_names(optimizer)
    if names and len(small) >= _FEWEST:
        # Not as an attribute that Keras would track: no checkpoint is to hold it.
        attributes: Any = vars(optimizer)
        weights = [replicas.native(target) for target in small]
        free = masters is not None and bool(masters.variables_of(weights)) and all(map(is_free, weights))
        attributes[_ATTRIBUTE] = Packed(optimizer, small, names, with_weights=free)


def packed(optimizer: Optimizer, grads: Sequence, targets: Sequence, masters: MasterWeights | None) -> Packed | None:
    """What holds the slots of some of `targets`, if a step with these gradients may use it."""
    found = getattr(optimizer, _ATTRIBUTE, None)
    dense = [v for grad, v in zip(grads, targets, strict=True) if not isinstance(grad, tf.IndexedSlices)]
    return found if found and found.covered_by(dense) and (masters or not found.with_weights) else None


class Packed:
    """The slots of some variables, in buffers or where Keras keeps them: `_in_buffers` says where they are.

    Whatever breaks off in the middle of moving them leaves them where they were.

    Attributes:
        targets: The variables whose slots these are.
        weights: The same, as TensorFlow's variables.
        sizes: The number of values in each.
        buffers: By the name of the optimizer's attribute, the slots of that kind one after the other.
        with_weights: Whether the variables themselves are kept so, too.
        flat_weights: The buffer for them; if they are not, a place for as many values.
    """

    def __init__(self, optimizer: Optimizer, targets: Sequence, names: Sequence[str], *, with_weights: bool):
        self.with_weights = with_weights
        self.targets = list(targets)
        self.weights = [replicas.native(target) for target in targets]
        self._shapes = [weight.shape for weight in self.weights]
        self.sizes = [shape.num_elements() for shape in self._shapes]
        indices = [optimizer._get_variable_index(target) for target in targets]
        slots = {name: [replicas.native(vars(optimizer)[name][index]) for index in indices] for name in names}
        with tf.init_scope(), tf.device(self.weights[0].device):
            self.buffers = {name: keras.Variable(tf.zeros([sum(self.sizes)]), trainable=False) for name in names}
            self.flat_weights = tf.Variable(tf.zeros([sum(self.sizes)]), trainable=False)
            self._in_buffers = tf.Variable(False, trainable=False)
        self._kept = [slot for name in names for slot in slots[name]] + (self.weights if with_weights else [])
        # As inputs of a function so many handles cost milliseconds a call, though it hardly ever uses them.
        with tf.init_scope(), tf.device("CPU"):
            self._stacked = tf.stack(self._handles())
        self._looked: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        for variable in self._kept:
            make_movable(variable)
            variable.keeper = self

    def __deepcopy__(self, memo: dict) -> None:
        """A copy of the optimizer has slots of its own, which nobody packed."""

    def covered_by(self, variables: Sequence) -> bool:
        """Whether all variables whose slots these are are among `variables`."""
        return {id(weight) for weight in self.weights} <= {id(replicas.native(variable)) for variable in variables}

    def join(self, grads: Sequence, targets: Sequence) -> Joined:
        """Joins the gradients of the variables whose slots these are."""
        positions = {id(replicas.native(target)): position for position, target in enumerate(targets)}
        return join(grads, [positions[id(weight)] for weight in self.weights], self.sizes)

    def split(self, values: tf.Tensor) -> list[tf.Tensor]:
        """Those of each variable, in its shape, of values as in a buffer."""
        parts = tf.split(values, self.sizes)
        return [tf.reshape(part, shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def gather(self, after: tf.Tensor) -> None:
        """Has the buffers hold what the slots do, which still count until `take_over`.

        Args:
            after: A tensor that is there when what was traced before has assigned what slots it assigns.
        """

        def copy(handles: tf.Tensor) -> None:
            kept = iter(tf.unstack(handles, num=len(self._kept)))
            for buffer in self._all_buffers():
                values = [tf.raw_ops.ReadVariableOp(resource=next(kept), dtype=tf.float32) for _ in self.sizes]
                buffer.assign(flat(values))

        with tf.control_dependencies([after]):
            tf.cond(self._in_buffers, lambda: None, lambda: apart(copy, self._stacked))

    def take_over(self, after: tf.Tensor) -> None:
        """Has the buffers count from now on: they were updated.

        Args:
            after: A tensor that is there when they were.
        """
        with tf.control_dependencies([after]):
            self._in_buffers.assign(True)

    def assigned(self, after: tf.Operation | tf.Tensor) -> None:
        """Has steps in functions and loops wait for an assignment of a slot, which `gather` does not let them see.

        Args:
            after: The assignment, in the graph that is traced.
        """
        graph = tf.compat.v1.get_default_graph()
        looked = self._looked.get(graph) == self._uses(graph)
        with tf.control_dependencies([after]):
            self._in_buffers.assign(False)
        if looked:
            self._looked[graph] = self._uses(graph)

    def restore(self) -> None:
        """Has the slots be where Keras keeps them, at this point of the program or of the graph that is traced."""
        if tf.executing_eagerly():
            if self._in_buffers.numpy():
                self._copy_back()
            return
        graph = tf.compat.v1.get_default_graph()
        if not hasattr(graph, "capture"):  # A SavedModel is written, and copies what is there.
            with context.eager_mode():
                self.restore()
        elif self._looked.get(graph) != self._uses(graph):
            tf.cond(self._in_buffers, self._copy_back, lambda: None)
            self._looked[graph] = self._uses(graph)

    def _uses(self, graph: tf.Graph) -> int:
        """How many operations of a graph may have moved the slots: those already there when it was last asked did not.

        Steps, loops and functions with steps in them all use `_in_buffers`.
        """
        return len(graph.capture(self._in_buffers.handle).consumers())

    def _copy_back(self) -> None:
        values = [value for buffer in self._all_buffers() for value in self.split(buffer.read_value())]
        copies = [
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            for handle, value in zip(self._handles(), values, strict=True)
        ]
        with tf.control_dependencies(None if tf.executing_eagerly() else copies):
            self._in_buffers.assign(False)

    def _handles(self) -> list:
        return [variable._handle for variable in self._kept]

    def _all_buffers(self) -> list[tf.Variable]:
        own = [replicas.native(buffer) for buffer in self.buffers.values()]
        return [*own, self.flat_weights] if self.with_weights else own


def _small(variable) -> bool:
    native = replicas.native(variable)
    return (
        type(native) in (ResourceVariable, MovableVariable)
        and native.dtype == tf.float32
        and native.shape.num_elements() <= _LARGEST
        and "CPU" in native.device
        and not gradients.overwrites(variable)
    )


def _slot_names(optimizer: Optimizer) -> list[str]:
    """The attributes that are lists of a slot for each variable."""
    own = {id(variable) for variable in optimizer.variables}
    return [
        name
        for name, value in vars(optimizer).items()
        if isinstance(value, list)
        and len(value) == len(optimizer._trainable_variables)
        and all(slot is None or id(slot) in own for slot in value)
    ]
