"""The loss scaler as a Keras optimizer, which replaces `keras.optimizers.LossScaleOptimizer`."""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from scaler import gradients
from scaler.authoring import check_connected
from scaler.backend import replicas
from scaler.backend.apply_steps import take_windows_over
from scaler.backend.autograph import no_autograph
from scaler.backend.packed import ChecksRestoredParts, warn_if_hook_missing
from scaler.backend.variables import outside_the_graph
from scaler.checks import as_loss, as_variables
from scaler.errors import InvalidArgument
from scaler.gate.loss_scaler import LossScaler
from scaler.gate.optimizers import build_optimizer, move_nothing, waits_for_values
from scaler.gradients.lists import Gradient, as_list
from scaler.keras import arguments
from scaler.keras.accumulation import Window
from scaler.keras.variables import Order, applies, follow
from scaler.misuse.losses import undivided_mean
from scaler.misuse.marks import UNSCALED, as_given
from scaler.misuse.trace import kinds_behind
from scaler.outcome.outcome import Outcome
from scaler.outcome.stuck import StuckPolicy, Watch
from scaler.strategies import NoScaling, Static, Strategy
from scaler.strategies.spike_guard import unguarded
from scaler.weights.masters import MasterWeights

_SAVED_AT_TIMES = ("masters", "_window", "step_counter", "dynamic_scale")
"""Parts that some checkpoints of a loss scale optimizer lack, ours or Keras's."""
_UNCHECKED = StuckPolicy("warn", consecutive_skips=20, consecutive_bad_losses=5)
"""When `fit` warns of a run that makes no progress. It takes less than elsewhere, since an epoch may be short."""


@keras.saving.register_keras_serializable(package="scaler")
class LossScaleOptimizer(ChecksRestoredParts, keras.optimizers.LossScaleOptimizer):
    """Wraps a Keras optimizer. It scales losses and applies or skips steps as `LossScaler` does.

        model.compile(scaler.LossScaleOptimizer(keras.optimizers.Adam(1e-3), scaler.Dynamic()), loss=..., metrics=...)
        scaler.protect(model)  # a skipped step also rolls back BatchNorm, seed generators and metrics
        model.fit(x, y, callbacks=[scaler.LossScaleLogger()])

    It is a subclass of `keras.optimizers.LossScaleOptimizer`, because `compile` then does not wrap it again under the
    policy `mixed_float16`. It uses none of that class's scaling. Variables in float16 and bfloat16 get float32 masters,
    which are saved with the optimizer. Clipping, weight decay, EMA and gradient accumulation of the inner optimizer
    work on unscaled gradients summed over replicas. An accumulated window is one step: a non-finite micro-batch skips
    its whole window, which still ends where it would have ended. `iterations` counts the applied windows.

    In your own train step, differentiate `scale_loss(loss)` and pass the scaled gradients to `apply`. Code for tf.keras
    2 passes the gradients of `get_scaled_loss` through `get_unscaled_gradients` to `apply_gradients`.

    Args:
        inner: A Keras optimizer that does not scale losses itself, or its name as for Keras's `compile`. Its
            `loss_scale_factor` is set to None: for a constant scale pass `Static(factor)`.
        strategy: How the scale moves. Default: `Dynamic()`.
        initial_scale: The first loss scale of the default `Dynamic`, as in Keras's class. Default: 2^15.
        dynamic_growth_steps: The growth interval of the default `Dynamic`. Default: 2000.
        sum_duplicates: As for `LossScaler`. False reproduces Keras bit for bit on an Embedding's repeated ids.
        select: As for `LossScaler`: whether new values are selected and no step branches.
        name: The optimizer's name.
        **keras_arguments: `inner_optimizer` for `inner`, `dynamic=True`, and the arguments in old configurations of
            Keras's class with the values that they hold there. Nothing else.

    Attributes:
        loss_scaler: The `LossScaler` inside: counters, `explain()`, `last_skip`, the strategy's state.
        masters: The float32 masters, or None if all variables are float32.

    Raises:
        InvalidArgument: If `inner` is not a Keras optimizer or scales losses itself, if a strategy is passed together
            with Keras's arguments, or if a value is out of range.
    """

    loss_scaler: LossScaler
    masters: MasterWeights | None

    def __init__(
        self,
        inner: keras.optimizers.Optimizer | str | None = None,
        strategy: Strategy | None = None,
        *,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        sum_duplicates: bool = True,
        select: bool | None = None,
        name: str | None = None,
        **keras_arguments: Any,
    ):
        optimizer = arguments.only_inner(inner, keras_arguments.pop("inner_optimizer", None))
        arguments.check_strategy()
        arguments.check_keras_arguments(name, keras_arguments, inspect.signature(LossScaleOptimizer).parameters)
        chosen = arguments.chosen_strategy(strategy, initial_scale, dynamic_growth_steps)
        with tf.init_scope():
            first = float(chosen.init().loss_scale)
        super().__init__(optimizer, first, None, name=name)
        optimizer.loss_scale_factor = None  # Keras's class does not reset it before 3.10.
        self._strategy_given = strategy is not None
        self.dynamic_growth_steps = getattr(chosen, "growth_interval", None)
        self.loss_scaler = LossScaler(chosen, sum_duplicates=sum_duplicates, select=select)
        # No warning of a missing rollback: `protect` rolls statistics back, and without it `apply` where it can.
        use = self.loss_scaler._calls.use
        use.statistics_are_kept = use.unconnected_are_named = True
        # The gradients of a window are the mean over its micro-batches, and so is the loss that a SpikeGuard judges.
        self.loss_scaler._calls.step.losses = int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)
        self.masters = None
        self._window: Window | None = None
        # A step may build the optimizer, and `protect` asks before it. What is saved is that of the window.
        self._rejected = types.SimpleNamespace(variable=None)
        if getattr(optimizer, "gradient_accumulation_steps", None):
            self._rejected.variable = replicas.local_variable(0.0, "rejected", tf.VariableAggregation.SUM)
        self._unscaled = replicas.local_variable(False, "unscaled")
        self._by_hand = False
        self._unchecked = Watch(_UNCHECKED)
        self._made_in = tf.distribute.get_strategy()
        self._order = Order()
        warn_if_hook_missing()

    def __setattr__(self, name: str, value: Any) -> None:
        if "loss_scaler" in vars(self):
            arguments.check_attribute(self, name, value)
        super().__setattr__(name, value)

    def build(self, variables: Sequence) -> None:
        """Creates the inner optimizer's slots, masters for 16-bit variables and sums for accumulation.

        Raises:
            InvalidArgument: If the variables were created in the scope of another `tf.distribute` strategy than this
                optimizer.
        """
        variables = list(variables)
        # Keras passes none while it loads an HDF5 file. The first step then passes them.
        if self.built or not variables:
            return
        arguments.check_scope(self._made_in, variables)
        inner, strategy = self.inner_optimizer, self._made_in
        with outside_the_graph(), replicas.in_scope(strategy):
            if any(tf.as_dtype(variable.dtype) in (tf.float16, tf.bfloat16) for variable in variables):
                self.masters = MasterWeights(variables)
            targets = self.masters.weights if self.masters else variables
            steps = getattr(inner, "gradient_accumulation_steps", None)
            if steps:  # `inner.apply` takes the mean of a whole window instead of a micro-batch.
                take_windows_over(inner)
                self._window = Window(steps, targets, self._rejected.variable)
            if not inner.built:
                inner.gradient_accumulation_steps = None  # Keras would create accumulators that are never used.
                try:
                    build_optimizer(inner, targets)
                finally:
                    inner.gradient_accumulation_steps = steps
                if self.masters:
                    follow(inner, self.masters, strategy)
            self.loss_scaler._spikes.bind(targets)
            # This skips the scale and the step counter of Keras's class: the loss scaler has its own.
            keras.optimizers.Optimizer.build(self, variables)
            self._order = Order(variables)
        # HDF5 files tell variables apart by `path`, which only Keras's own variables have.
        for number, variable in enumerate(own for own in self.variables if not hasattr(own, "path")):
            object.__setattr__(variable, "path", f"{self.name}/{number}_{variable.name.split(':')[0]}")

    @property
    def variables(self) -> list:
        """All saved variables: those of the inner optimizer and the loss scaler, masters, an accumulation window."""
        model = {id(variable) for variable in self._order.variables}
        masters = [master for master in (self.masters.weights if self.masters else ()) if id(master) not in model]
        window = self._window.variables if self._window else ()
        return [*super().variables, *self.loss_scaler.variables, *masters, *window]

    def set_weights(self, weights: Sequence) -> None:
        """Assigns all of `variables`.

        Raises:
            InvalidArgument: If the number of arrays differs.
        """
        variables = self.variables
        if len(weights) != len(variables):
            raise InvalidArgument(
                f"set_weights: {len(weights)} arrays for {len(variables)} variables: expected one for each of "
                "optimizer.variables. Take them from an optimizer that was built for the same model."
            )
        for variable, weight in zip(variables, weights, strict=True):
            variable.assign(weight)

    @no_autograph
    def scale_loss(self, loss: Any) -> tf.Tensor:
        """Multiplies the loss by the loss scale, in float32. Differentiate the result.

        Args:
            loss: A floating-point scalar, or a tensor of losses whose sum is differentiated.
        """
        loss = as_loss(loss) if loss is None or isinstance(loss, dict) else tf.convert_to_tensor(loss)
        if self._by_hand:
            self._unscaled.assign(False)
        if loss.shape.rank in (0, None):
            self.loss_scaler._calls.use.say_once(undivided_mean(loss))
            return self.loss_scaler.scale(loss)
        whole, calls = as_loss(tf.reduce_sum(loss)), self.loss_scaler._calls
        calls.check_loss(whole)
        each = tf.cast(loss, tf.float32)
        # The scale of a loss that is known: read under the tape, it would be that of one scaled by hand.
        return calls.scaled(each * calls.scales(tf.reduce_sum(each)))

    @no_autograph
    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence | None = None) -> Outcome:
        """Applies the step if the unscaled gradients are finite, else skips it: see `LossScaler.apply`.

        Args:
            grads: Gradients of the scaled loss: tensors, `tf.IndexedSlices` or None. Several gradients of one variable
                are added.
            trainable_variables: A variable for each gradient. Default: the variables that this was built for.

        Returns:
            What happened, as tensors.

        Raises:
            InvalidArgument: In cross-replica context, or if gradients and variables do not match.
        """
        arguments.check_context()
        if not isinstance(grads, (list, tuple)) or not grads:
            raise InvalidArgument(f"apply(grads={grads!r}): expected a list of gradients, one for each variable.")
        grads = as_list("apply", grads)
        if trainable_variables is None and not self.built:
            raise InvalidArgument("apply(grads): pass the variables, too, or call build(variables) first.")
        given_variables = self._order.variables if trainable_variables is None else trainable_variables
        variables = as_variables("apply", given_variables)
        given = (v for g, v in zip(grads, variables, strict=False) if g is not None)
        with applies(self, given):
            return self._apply(grads, variables)

    def _apply(self, grads: list, variables: Sequence) -> Outcome:
        if not self.built:
            unique = list({id(replicas.native(variable)): variable for variable in variables}.values())
            if waits_for_values(self, unique):
                return self.loss_scaler.apply(move_nothing, grads, variables, allow_16bit_updates=True)
            replicas.merge(lambda strategy: self.build(unique))
        alone = len({id(replicas.native(variable)) for variable in variables}) == len(grads) == len(variables)
        if alone and not self._window:  # A window refuses gradients that come and go.
            check_connected(self.loss_scaler, grads, variables)
        grads = self._order.in_order(grads, variables)
        unscaled = self._are_unscaled(grads) if self._by_hand else False
        complete: bool | tf.Tensor = True
        loss_scale = None
        if self._window:
            loss_scale = self.loss_scaler._calls.carried(
                "apply", grads, variables, may_be_unscaled=unscaled is not False
            ).loss_scale
            grads = self.loss_scaler._calls.undivided(grads, self._order.variables, unscaled)
            grads, complete = self._window.add(grads, tf.where(unscaled, 1.0, loss_scale))
            grads = as_given(grads)
        targets = self.masters or self._order.variables
        return self.loss_scaler.apply(
            self.inner_optimizer, grads, targets, unscaled=unscaled, when=complete, loss_scale=loss_scale
        )

    @no_autograph
    def apply_gradients(self, grads_and_vars: Any) -> tf.Variable:
        """Does the same as `apply` for pairs of a gradient and a variable. Returns the inner `iterations`."""
        pairs = list(grads_and_vars)
        self.apply([grad for grad, _ in pairs], [variable for _, variable in pairs])
        return self.iterations

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> None:
        """Not supported, as with any Keras optimizer on TensorFlow."""
        raise InvalidArgument("stateless_apply is not supported on TensorFlow: call apply(grads, variables).")

    def exclude_from_weight_decay(
        self, var_list: Sequence | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Excludes variables from the inner optimizer's weight decay: see Keras's method of this name."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    @property
    def iterations(self) -> tf.Variable:
        """The inner optimizer's `iterations`: the number of applied steps or windows."""
        return self.inner_optimizer.iterations  # Before 3.9 Keras's class has its own.

    @property
    def loss_scale(self) -> tf.Tensor:
        """The scale that multiplies the next loss, scalar float32."""
        return self.loss_scaler.loss_scale

    @property
    def seen(self) -> tf.Tensor:
        """What this replica has counted so far, for `rejected_since`."""
        own = self._rejected.variable
        return self.loss_scaler._stored.all_counts if own is None else tf.identity(own)

    def rejected_since(self, seen: tf.Tensor) -> tf.Tensor:
        """Whether a batch, or a micro-batch of a window, was not finite since then: scalar bool."""
        if self._rejected.variable is not None:
            return self.seen > seen
        return self.loss_scaler._stored.skipped_since(seen)

    def check_part(self, name: str, cached_dependencies: dict | None) -> None:
        """Refuses the checkpoint of an optimizer that was not wrapped.

        TensorFlow would restore its iterations and none of its slots.

        Raises:
            InvalidArgument: With the object to restore it into.
        """
        if cached_dependencies is not None and name not in cached_dependencies and name not in _SAVED_AT_TIMES:
            raise InvalidArgument(
                f"LossScaleOptimizer: the checkpoint holds an optimizer that was not wrapped (with {name!r}): expected "
                "a wrapped one. Restore it into the inner optimizer, with "
                "tf.train.Checkpoint(optimizer=optimizer.inner_optimizer), or into a model compiled with the inner "
                "optimizer, and wrap that afterwards. Steps and slots are then kept."
            )

    @property
    def dynamic_scale(self) -> tf.Tensor:
        """The same as `loss_scale`, under Keras 3's name."""
        return self.loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return not isinstance(unguarded(self.loss_scaler.strategy), (Static, NoScaling))

    def get_scaled_loss(self, loss: Any) -> Any:
        """The same as `scale_loss`, under tf.keras 2's name.

        A function that returns a loss gives a function that returns the scaled loss.
        """
        return (lambda: self.scale_loss(loss())) if callable(loss) else self.scale_loss(loss)

    def get_unscaled_gradients(
        self, grads: Sequence[Gradient], *, loss_scale: tf.Tensor | None = None
    ) -> list[Gradient]:
        """Turns gradients of the scaled loss into gradients of the loss, in float32, as in tf.keras 2.

        In a graph `apply` knows them by what they are computed from. In eager mode it takes all gradients as unscaled
        until the next loss is scaled. Gradients that you kept take the `loss_scale` that you kept with them.
        """
        self._by_hand = True
        self._unscaled.assign(True)
        return self.loss_scaler.unscale(grads, loss_scale=loss_scale)

    def minimize(self, loss: Any, var_list: Sequence, tape: tf.GradientTape | None = None) -> tf.Variable:
        """Scales the loss, differentiates it and applies the gradients, as in tf.keras 2.

        Args:
            loss: A function that returns the loss, or the loss itself together with its `tape`.
            var_list: The variables to update.
            tape: The tape that recorded the loss, if the loss is a tensor.
        """
        if not callable(loss) and tape is None:
            raise InvalidArgument("minimize(loss, ...): a loss that is a tensor needs the tape that recorded it.")
        with tape or tf.GradientTape() as tape:
            scaled = self.scale_loss(loss() if callable(loss) else loss)
        return self.apply_gradients(zip(tape.gradient(scaled, var_list), var_list, strict=True))

    def updates(self, variable: Any) -> bool:
        """Whether any step traced so far had a gradient for the variable."""
        return self._order.updates(variable)

    def finalize_variable_values(self, var_list: Sequence) -> None:
        """Assigns the inner optimizer's EMA to variables and masters. Keras calls it at the end of `fit`."""
        if tf.executing_eagerly():
            warn_if_stuck(self)
        inside = (self.inner_optimizer, *getattr(self.inner_optimizer, "optimizers", ()))
        if not any(getattr(each, "use_ema", False) for each in inside):
            self.inner_optimizer.finalize_variable_values(var_list)
        elif int(tf.convert_to_tensor(self.iterations)):  # Before the first step all averages are zero.
            targets = self.masters.weights if self.masters else self._order.variables
            self.inner_optimizer.finalize_variable_values(targets)
            if self.masters:
                with self._made_in.scope():
                    self.masters.write()

    def get_config(self) -> dict:
        """Returns the inner optimizer and the strategy as plain data.

        Raises:
            InvalidArgument: If the strategy cannot be saved.
        """
        config = {"name": self.name, "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer)}
        if not self.loss_scaler.sum_duplicates:
            config["sum_duplicates"] = False
        if self.loss_scaler.select is not None:
            config["select"] = self.loss_scaler.select
        if self._strategy_given:
            return {**config, "strategy": arguments.to_config(self.loss_scaler.strategy)}
        return {**config, "initial_scale": self.initial_scale, "dynamic_growth_steps": self.dynamic_growth_steps}

    @classmethod
    def from_config(cls, config: dict, custom_objects: dict | None = None) -> LossScaleOptimizer:
        """Makes the optimizer that `get_config` describes.

        Raises:
            InvalidArgument: If the class of the strategy is not known here.
        """
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(config.pop("inner_optimizer"), custom_objects=custom_objects)
        if "strategy" in config:
            config["strategy"] = arguments.from_config(config["strategy"], custom_objects)
        return cls(inner, **config)

    def _are_unscaled(self, grads: list) -> bool | tf.Tensor:
        """Whether gradients went through `get_unscaled_gradients`. Their marks tell, in eager mode the last call."""
        given = [gradients.values_of(grad) for grad in grads if tf.is_tensor(grad)]
        found = set() if tf.executing_eagerly() else kinds_behind(given)
        if found and (UNSCALED not in found or found == {UNSCALED}):
            return UNSCALED in found
        return tf.identity(self._unscaled)


def warn_if_stuck(optimizer: LossScaleOptimizer) -> None:
    """Warns of no progress that no `check` looks at: after each epoch with `protect`, else at the end of `fit`."""
    own = optimizer.loss_scaler
    if len(own._watch.history.readings) < 2 and own.stuck.action != "continue":
        advice = " hs.LossScaleLogger() among the callbacks ends such a run."
        own._look(optimizer._unchecked, own._stored.read(), advice)
