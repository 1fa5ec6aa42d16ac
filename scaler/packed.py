"""Slots of small variables in one buffer for each kind of slot, so that an update touches few variables.

With hundreds of small variables a step costs what its variables cost to look up, whatever is computed. Momenta,
velocities and other slots are the optimizer's alone between two steps. So they lie in one flat buffer a kind while
steps are taken, and go back to where Keras keeps them as soon as anybody asks: to print, assign, save or restore one,
or to run the optimizer by hand. The weights are read and written where they are, by every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from scaler import gradients, replicas
from scaler.graphs import apart
from scaler.masters import MasterWeights, refreshed, rounded_to
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
_BY_DIFFERENCE = tuple(each for each in _ELEMENTWISE if each is not keras.optimizers.Ftrl)
"""Without weight decay, these add something to a variable that does not depend on its value."""
_LARGEST = 2**14
"""Elements of a variable above which moving them costs as much as what is saved."""
_FEWEST = 32
"""Variables below which a step does not feel them."""
_ATTRIBUTE = "_scaler_packed"


def pack(optimizer: Optimizer, grads: Sequence[gradients.Gradient], targets: Sequence) -> None:
    """Has the slots of small variables kept in buffers from now on, if there are enough of them.

    Args:
        optimizer: Its updates are compiled, and it was built just now: nobody has traced a function that reads or
            assigns its slots.
        grads: Of any floating dtype.
        targets: A variable for each.
    """
    if type(optimizer) not in _ELEMENTWISE or optimizer.use_ema:
        return
    small = [v for grad, v in zip(grads, targets, strict=True) if not isinstance(grad, tf.IndexedSlices) and _small(v)]
    names = _slot_names(optimizer)
    if names and len(small) >= _FEWEST:
        # Not as an attribute that Keras would track: no checkpoint is to hold it.
        attributes: Any = vars(optimizer)
        attributes[_ATTRIBUTE] = Packed(optimizer, small, names)


def packed(optimizer: Optimizer, grads: Sequence, targets: Sequence) -> Packed | None:
    """What holds the slots of some of `targets`, if a step with these gradients may use it."""
    found = getattr(optimizer, _ATTRIBUTE, None)
    dense = [v for grad, v in zip(grads, targets, strict=True) if not isinstance(grad, tf.IndexedSlices)]
    return found if found and found.covered_by(dense) else None


class Joined(NamedTuple):
    """Gradients, those of packed variables as one.

    Attributes:
        pieces: The joined one first, if there is one, then the others.
        sizes: The number of values from each that was joined.
        order: Where each stood, those that were joined first.
    """

    pieces: list
    sizes: list[int]
    order: list[int]

    @property
    def whole(self) -> tf.Tensor | None:
        """The joined gradient, or None."""
        return self.pieces[0] if self.sizes else None

    def split(self, pieces: list) -> list:
        """The gradients one by one as they stood, from `pieces`; those that were joined without their shapes."""
        parts = [*tf.split(pieces[0], self.sizes), *pieces[1:]] if self.sizes else pieces
        return [part for _, part in sorted(zip(self.order, parts, strict=True), key=lambda pair: pair[0])]


def unjoined(grads: Sequence) -> Joined:
    """Gradients of which none are joined."""
    return Joined(list(grads), [], list(range(len(grads))))


class Packed:
    """The slots of some variables, in buffers or in Keras's variables: `_in_buffers` says where they are.

    Whatever breaks off in the middle of moving them leaves them where they were.

    Attributes:
        weights: TensorFlow's variables whose slots these are.
    """

    def __init__(self, optimizer: Optimizer, targets: Sequence, names: Sequence[str]):
        self._targets = list(targets)
        self.weights = [replicas.native(target) for target in targets]
        self._shapes = [weight.shape for weight in self.weights]
        self._sizes = [shape.num_elements() for shape in self._shapes]
        indices = [optimizer._get_variable_index(target) for target in targets]
        slots = {name: [replicas.native(vars(optimizer)[name][index]) for index in indices] for name in names}
        with tf.init_scope(), tf.device(self.weights[0].device):
            self._buffers = {name: keras.Variable(tf.zeros([sum(self._sizes)]), trainable=False) for name in names}
            self._weight = tf.Variable(tf.zeros([sum(self._sizes)]), trainable=False)
            self._in_buffers = tf.Variable(False, trainable=False)
        self._slots = [slot for name in names for slot in slots[name]]
        # As inputs of a function so many handles cost milliseconds a call, though it hardly ever uses them.
        with tf.init_scope(), tf.device("CPU"):
            self._stacked = tf.stack(self._handles())
        self._looked: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        for slot in self._slots:
            slot.packed = self
            slot.__class__ = _PackedSlot

    def __deepcopy__(self, memo: dict) -> None:
        """A copy of the optimizer has slots of its own, which nobody packed."""

    def covered_by(self, variables: Sequence) -> bool:
        """Whether all variables whose slots these are are among `variables`."""
        return {id(weight) for weight in self.weights} <= {id(replicas.native(variable)) for variable in variables}

    def join(self, grads: Sequence, targets: Sequence) -> Joined:
        """Joins the gradients of the variables whose slots these are."""
        positions = {id(replicas.native(target)): position for position, target in enumerate(targets)}
        joined = [positions.pop(id(weight)) for weight in self.weights]
        own, others = [grads[i] for i in joined], [grads[i] for i in positions.values()]
        alike = len({grad.dtype for grad in own}) == 1
        whole = _flat(own if alike else gradients.to_float32(own))
        return Joined([whole, *others], self._sizes, [*joined, *positions.values()])

    def gather(self, after: tf.Tensor) -> None:
        """Has the slots be in their buffers, which they stay beside until `update` has moved them there.

        Args:
            after: A tensor that is there when what was traced before has assigned what slots it assigns.
        """

        def copy(handles: tf.Tensor) -> None:
            slots = iter(tf.unstack(handles, num=len(self._slots)))
            for buffer in self._buffers.values():
                values = [tf.raw_ops.ReadVariableOp(resource=next(slots), dtype=tf.float32) for _ in self._sizes]
                buffer.assign(_flat(values))

        with tf.control_dependencies([after]):
            tf.cond(self._in_buffers, lambda: None, lambda: apart(copy, self._stacked))

    def update(
        self,
        optimizer: Optimizer,
        pairs: Sequence[tuple],
        joined: tf.Tensor | None,
        masters: MasterWeights | None,
        finish: Callable,
        learning_rate: tf.Tensor,
    ) -> list:
        """Has the optimizer move the variables, after `gather`.

        Args:
            optimizer: The one whose slots these are.
            pairs: Scaled gradients and their variables, these and others.
            joined: These gradients as one; None if `finish` does not do the same to all of them.
            masters: Those of the variables, or None. They take over what was assigned to the model first, and are
                rounded into it last.
            finish: Makes the gradient that the optimizer is to see of a scaled one and its variable.
            learning_rate: Scalar float32.

        Returns:
            The pairs of the others.
        """
        given = {id(variable): grad for grad, variable in pairs}
        own = [given.pop(id(weight)) for weight in self.weights]
        rounded = masters.variables_of(self.weights) if masters else []
        if masters and not rounded:
            masters.refresh(self.weights)

        def seen(grads: list) -> tf.Tensor:
            return _flat(list(map(finish, grads, self.weights))) if joined is None else finish(*grads)

        grads = own if joined is None else [joined]
        if type(optimizer) in _BY_DIFFERENCE and optimizer.weight_decay is None and not rounded:
            moved = self._differences(optimizer, grads, seen, learning_rate)
            self._each_of(moved, self.weights, lambda weight, difference: weight.assign_add(difference))
        else:
            moved, model = self._values(optimizer, grads, seen, rounded, learning_rate)
            self._each_of(moved, self.weights, lambda weight, value: weight.assign(value))
            if rounded:
                self._each_of(model, rounded, lambda variable, value: variable.assign(value))
        if masters and not rounded:
            masters.write(self.weights)
        with tf.control_dependencies([moved]):
            self._in_buffers.assign(True)
        return [pair for pair in pairs if id(pair[1]) in given]

    def _differences(self, optimizer: Optimizer, grads: list, seen: Callable, learning_rate: tf.Tensor) -> tf.Tensor:
        """What is to be added to the weights: the slots are moved already."""

        @tf.function(jit_compile=True, autograph=False)
        def step(grads: list, learning_rate: tf.Tensor) -> tf.Tensor:
            twin, moves = self._twin(optimizer), []
            shadows = {
                "assign_add": lambda variable, value: self._moved(variable, value, moves),
                "assign_sub": lambda variable, value: self._moved(variable, -value, moves),
            }
            vars(twin).update(shadows)
            twin.update_step(seen(grads), self._weight, learning_rate)
            (difference,) = moves
            return difference

        return step(grads, learning_rate)

    def _moved(self, variable, value: tf.Tensor, moves: list) -> None:
        if variable is self._weight:
            moves.append(value)
        else:
            variable.assign_add(value)

    def _values(
        self, optimizer: Optimizer, grads: list, seen: Callable, rounded: list, learning_rate: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """The new weights, and if they are masters the same rounded; the slots are moved already."""
        twin = self._twin(optimizer)
        decays = [bool(optimizer._use_weight_decay(target)) for target in self._targets]

        @tf.function(jit_compile=True, autograph=False)
        def step(grads: list, weight: tf.Tensor, model: tf.Tensor | None, learning_rate: tf.Tensor) -> tuple:
            weight = weight if model is None else refreshed(weight, model)
            self._weight.assign(weight)
            if optimizer.weight_decay is not None:
                type(optimizer)._apply_weight_decay(twin, [self._weight])
                self._weight.assign(tf.where(tf.repeat(decays, self._sizes), self._weight, weight))
            twin.update_step(seen(grads), self._weight, learning_rate)
            moved = self._weight.read_value()
            return moved, None if model is None else rounded_to(moved, model.dtype)

        return step(grads, _flat(self.weights), _flat(rounded) if rounded else None, learning_rate)

    def _each_of(self, flat: tf.Tensor, variables: Sequence, change: Callable) -> None:
        for variable, values in zip(variables, tf.split(flat, self._sizes), strict=True):
            change(variable, tf.reshape(values, variable.shape))

    def restore(self) -> None:
        """Has the slots be in Keras's variables, at this point of the program or of the graph that is traced."""
        if tf.executing_eagerly():
            if self._in_buffers.numpy():
                self._copy_back()
            return
        graph = tf.compat.v1.get_default_graph()
        if self._looked.get(graph) != self._uses(graph):
            tf.cond(self._in_buffers, self._copy_back, lambda: None)
            self._looked[graph] = self._uses(graph)

    def _uses(self, graph: tf.Graph) -> int:
        """How many operations of a graph may have moved the slots: those already there when it was last asked did not.

        Steps, loops and functions with steps in them all use `_in_buffers`.
        """
        return len(graph.capture(self._in_buffers.handle).consumers())

    def _copy_back(self) -> None:
        values = [v for buffer in self._buffers.values() for v in tf.split(buffer.value, self._sizes)]
        shapes = self._shapes * len(self._buffers)
        copies = [
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.reshape(value, shape))
            for handle, value, shape in zip(self._handles(), values, shapes, strict=True)
        ]
        with tf.control_dependencies(None if tf.executing_eagerly() else copies):
            self._in_buffers.assign(False)

    def _handles(self) -> list:
        return [slot._handle for slot in self._slots]

    def _twin(self, optimizer: Optimizer) -> Any:
        """The optimizer, but for a single variable and its slots: the buffers."""
        twin = object.__new__(type(optimizer))
        vars(twin).update(vars(optimizer), _get_variable_index=lambda _: 0, _use_weight_decay=lambda _: True)
        vars(twin).update({name: [buffer] for name, buffer in self._buffers.items()})
        return twin


class _PackedSlot(ResourceVariable):
    """A slot of Keras's optimizer that may lie in a buffer.

    TensorFlow reads and assigns through the handle, and so do checkpoints.
    """

    packed: Packed

    @property
    def handle(self) -> tf.Tensor:
        self.packed.restore()
        return self._handle


def _flat(tensors: Sequence) -> tf.Tensor:
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def _small(variable) -> bool:
    native = replicas.native(variable)
    return (
        type(native) is ResourceVariable
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
