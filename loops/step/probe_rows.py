"""What the probes of a step measure of weights, of their gradients and updates, and of an optimizer's slots."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

import scaler
from loops.step.accumulation import local_variable

_KEEP_NOTHING = (scaler.weights.KahanWeights, scaler.weights.StochasticRounding)


class Look:
    """Trainable variables as they were before a step, and whether it is measured.

    Args:
        variables: The model's.
        masters: Their master weights, or None.
        read: Whether to keep their values.
        due: Whether this step is measured, scalar bool; None for always. The values of others are not kept.
        at_its_turn: The same at a call that is known to be the part's turn.
        loss_scale: What the gradients are scaled by, scalar float32.

    Attributes:
        variables: The argument.
        due: The argument.
        at_its_turn: The argument.
        loss_scale: The argument.
    """

    def __init__(
        self,
        variables: list,
        masters: scaler.MasterWeights | None,
        read: bool,
        due: tf.Tensor | None,
        at_its_turn: tf.Tensor | None,
        loss_scale: tf.Tensor,
    ):
        self.due, self.at_its_turn, self.loss_scale = due, at_its_turn, loss_scale
        self.variables = variables
        self._updated = masters.weights if masters else variables
        self._own = [updated is variable for updated, variable in zip(self._updated, variables, strict=True)]

        def values() -> tuple[list[tf.Tensor], list[tf.Tensor]]:
            values = [tf.identity(tf.convert_to_tensor(variable)) for variable in variables]
            kept = values if isinstance(masters, _KEEP_NOTHING) else self._updated
            pairs = zip(kept, values, strict=True)
            return values, [_start(tf.convert_to_tensor(one), value) for one, value in pairs]

        # Eagerly all is measured, also what is then thrown away.
        when = None if tf.executing_eagerly() else due
        self._kept = scaler.observe.if_due(when, values, fill=None) if read else ([], [])

    @property
    def values(self) -> list[tf.Tensor]:
        """The variables' values, at a step that is measured."""
        return self._shaped(self._kept[0])

    @property
    def start(self) -> list[tf.Tensor]:
        """What the step adds to, float32: the masters, where there are some."""
        return self._shaped(self._kept[1])

    def _shaped(self, kept: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        # At a step that is not measured there are no values, so a graph does not know their shape.
        pairs = zip(kept, self.variables, strict=True)
        return [one if one.shape == variable.shape else tf.reshape(one, variable.shape) for one, variable in pairs]

    def updates(self, applied: tf.Tensor) -> list[tf.Tensor]:
        """The step's change of each variable, float32; zeros if it was not applied."""
        after = [tf.cast(tf.convert_to_tensor(variable), tf.float32) for variable in self._updated]
        pairs = zip(after, self.start, strict=True)
        return [tf.where(applied, now - then, tf.zeros_like(then)) for now, then in pairs]

    def swallowed(self, updates: list[tf.Tensor], applied: tf.Tensor) -> tf.Tensor:
        """The share of each update that its variable's dtype rounds away, float32 [variables]; NaN if unknown."""
        shares = [
            tf.constant(float("nan")) if own else scaler.observe.swallowed_share(value, update)
            for own, value, update in zip(self._own, self.values, updates, strict=True)
        ]
        return tf.where(applied, tf.stack(shares), float("nan"))


def rms_by_layer(layers: Sequence[str], updates: Sequence[tf.Tensor], start: Sequence[tf.Tensor]) -> tf.Tensor:
    """For each layer the root mean square of its update, and its ratio to that of its weights: float32 [layers, 2].

    The ratio is infinite for weights that are all 0, as biases are at the start, and NaN for an update of 0 to them.

    Args:
        layers: The layer of each variable.
        updates: What was added to each, float32.
        start: What it was added to, float32.
    """
    found = []
    for layer in dict.fromkeys(layers):
        places = [place for place, own in enumerate(layers) if own == layer]
        size = float(sum(updates[place].shape.num_elements() for place in places))
        # l2_loss is half of the sum of squares.
        halves = (tf.add_n([tf.nn.l2_loss(values[place]) for place in places]) for values in (updates, start))
        update, weight = (2.0 * half for half in halves)
        found.append([tf.sqrt(update / size), tf.sqrt(update / weight)])
    return tf.reshape(found, [len(found), 2])


def _start(master: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """The value before the update, float32: the master, or a value assigned to the model since the last update."""
    kept = tf.equal(tf.saturate_cast(master, value.dtype), value)
    return tf.where(kept, tf.cast(master, tf.float32), tf.cast(value, tf.float32))


PARTS = ("noise", "signal")
"""What a step measures: the two estimates whose ratio is the noise scale."""


class NoiseScale(tf.Module):
    """Estimates of the gradient's noise and of its signal, from gradients of two batch sizes.

    McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", arXiv:1812.06162, appendix A.1. One replica's
    micro-batch of b examples has the gradient g, and all n of a step together G. Then

        signal = (n |G|^2 - |g|^2) / (n - 1)          estimates the squared norm of the true gradient,
        noise = b n (|g|^2 - |G|^2) / (n - 1)         the trace of the covariance of one example's gradient.

    |g|^2 is its mean over the micro-batches. Over replicas, too, since outputs are averaged over them and both are
    linear in it. Each is unbiased, and noisy: a signal may be below 0. The ratio of their means over many steps is the
    simple noise scale, the batch size above which more examples help little.

    Args:
        micro_batches: How many a step has on each replica.
        replicas: How many there are.

    Raises:
        scaler.InvalidArgument: For one micro-batch on one replica.
    """

    def __init__(self, micro_batches: int, replicas: int):
        super().__init__(name="noise_scale")
        self._micro_batches, self._parts = micro_batches, micro_batches * replicas
        if self._parts == 1:
            raise scaler.InvalidArgument(
                "observe.watch(kinds=['noise_scale']): the gradient noise scale compares gradients of two batch sizes, "
                "and this step has one micro-batch on one replica: expected TrainStep(accumulate=2) or more, "
                "ComposedStep(forward=..., accumulate=2) or more, or a strategy with several replicas."
            )
        self._sum: tf.Variable | None = None
        if micro_batches > 1:
            with tf.init_scope():
                self._sum = local_variable(0.0, "sum_of_squared_norms")

    def measured(
        self, grads: Sequence, loss_scale: tf.Tensor, x: Any, attempted: tf.Tensor, grad_norm: tf.Tensor
    ) -> tf.Tensor:
        """Noise and signal, float32 [2]; NaN unless this call ended a step whose gradients are finite.

        Args:
            grads: This micro-batch's scaled gradients of its share of the mean loss.
            loss_scale: Their scale.
            x: The micro-batch's inputs.
            attempted: Whether the call ended a step, scalar bool.
            grad_norm: The norm of the step's unscaled gradient.
        """
        own = scaler.gradients.unscale([grad for grad in grads if grad is not None], loss_scale / self._parts)
        small = 2.0 * tf.add_n([tf.nn.l2_loss(tf.cast(_values(grad), tf.float32)) for grad in own])
        if self._sum is not None:
            total = self._sum + small
            self._sum.assign(tf.where(attempted, 0.0, total))
            small = total / self._micro_batches
        large, parts = tf.square(grad_norm), float(self._parts)
        noise = tf.cast(_size(x), tf.float32) * parts * (small - large) / (parts - 1)
        found = tf.stack([noise, (parts * large - small) / (parts - 1)])
        return tf.where(tf.reduce_all(tf.math.is_finite(found)), found, float("nan"))


def _values(grad: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def _size(x: Any) -> tf.Tensor:
    """The number of examples in a batch of inputs."""
    first = tf.nest.flatten(x)[0]
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    return first.dense_shape[0] if isinstance(first, tf.SparseTensor) else tf.shape(first)[0]


_FLOATS = (tf.float16, tf.bfloat16, tf.float32)


class Weights(NamedTuple):
    """The trainable variables and slots that are watched.

    Attributes:
        rows: For each row by name its kind, and the position of its variable or slot.
        slots: The optimizer's.
        layers: For each variable that is watched the path of its innermost layer.
        places: Their positions in the step's trainable variables.
        counted: The positions of those whose values are counted: all but float64.
    """

    rows: dict[str, tuple[str, int]]
    slots: list
    layers: list[str]
    places: list[int]
    counted: list[int]


def weights_of(watch: scaler.observe.Watch, before: Look, grads: Sequence, optimizer: Any) -> Weights:
    """What a watch asks for of the trainable variables.

    Args:
        watch: The watch.
        before: The variables.
        grads: The scaled gradient of each of them, or None.
        optimizer: The optimizer with the slots.
    """
    kinds, variables = watch.kinds, before.variables
    holders, names = _names(watch.model, variables)
    watched, own = watch.holds(), {id(variable) for variable in watch.model.variables}

    def holds(variable: Any) -> bool:
        # A part of a step may move more than the model that is watched. What takes its gradient as its value is no
        # weight: the scales and histories of float8 layers.
        return id(variable) in own and watched(variable) and not scaler.gradients.overwrites(variable)

    held = [place for place, variable in enumerate(variables) if holds(variable)]
    uncounted = [place for place in held if tf.as_dtype(variables[place].dtype) not in _FLOATS]
    if {"weight_gradients", "weights", "updates"} & {*kinds}:
        watch.leave_out([names[place] for place in uncounted], "float64 has exponents outside of the bins.")
    counted = [place for place in held if place not in uncounted]
    having = {"weight_gradients": [place for place in counted if grads[place] is not None]}
    rows: dict[str, tuple[str, int]] = {
        f"{kind}/{names[place]}": (kind, place)
        for kind in ("weight_gradients", "weights", "updates")
        for place in having.get(kind, counted)
        if kind in kinds
    }
    slots = _slots(optimizer, dict(zip(names, variables, strict=True)), holds) if "slots" in kinds else {}
    rows |= {f"slots/{name}": ("slots", place) for place, name in enumerate(slots)}
    return Weights(rows, list(slots.values()), [holders[place] for place in held], held, counted)


def _names(model: Any, variables: list) -> tuple[list[str], list[str]]:
    """The path of each variable's innermost layer, and a unique name: that path and the variable's name."""
    holders: dict[int, str] = {}
    for path, layer in scaler.observe.layers_by_path(model).items():
        holders |= {id(variable): path for variable in layer.variables}
    paths = [holders.get(id(variable), model.name) for variable in variables]
    names: list[str] = []
    for path, variable in zip(paths, variables, strict=True):
        names.append(free_name(f"{path}/{variable.name}", names))
    return paths, names


def free_name(name: str, taken: Container[str]) -> str:
    """The name, or with ":2", ":3", ... if it is taken."""
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}:{number}"
    return free


def _slots(optimizer: Any, variables: dict[str, Any], holds: Callable[[Any], bool]) -> dict[str, Any]:
    """The optimizer's float variables, except those of weights that are not watched; named after their weight."""
    out = tuple(f"{name}/" for name, variable in variables.items() if not holds(variable))
    found: dict[str, Any] = {}
    for slot in getattr(optimizer, "variables", []):
        if tf.as_dtype(slot.dtype) in _FLOATS and not slot.path.endswith("learning_rate"):
            # Drops the optimizer's name: Keras numbers optimizers per process.
            own = slot.path.partition("/")[2] or slot.path
            for name, variable in variables.items():
                own = own.replace(f"{variable.path.replace('/', '_')}_", f"{name}/", 1)
            if not own.startswith(out):
                found[own] = slot
    return found
