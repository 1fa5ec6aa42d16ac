"""The train step of a Keras model, which defines the order of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend.replica_losses import as_loss, means
from loops.step.accumulation import MicroBatches
from loops.step.arguments import (
    as_loss_scaler,
    as_optimizer,
    check_accumulate,
    check_late_layers,
    check_made_masters,
    check_masters,
    check_parts,
    check_retry,
    check_scaling,
    computes_in_float16,
    default_scaler,
    has_16bit,
)
from loops.step.losses import Loss, as_loss_function, read_loss
from loops.step.order import Group, clips_by_tensor, take_step
from loops.step.parts import OwnStep, layers_in
from loops.step.passes import Role, Taken, take
from loops.step.probing import OUTPUTS as PROBED
from loops.step.probing import Probing, check_probes
from loops.support.batches import explaining, parts

OUTPUTS = (
    "loss",
    "attempted",
    "applied",
    "loss_scale",
    "grad_norm",
    "clipped_norm",
    "cause",
    "variable",
    "swallowed",
)
"""The outputs of every `TrainStep`; its loss function may add others."""


class TrainStep(OwnStep):
    """A train step for a Keras model: forward, backward, accumulate, then apply or skip.

        step = loops.TrainStep(model, loss_fn, optimizer, loss_scaler=scaler.LossScaler(scaler.Dynamic()))
        outputs = step((x, y))

    Variables of the model that are float16 or bfloat16 are trained through float32 master weights. A skipped step
    also restores what the forward pass assigned in any Keras layer, whoever owns it: BatchNorm's statistics, seeds,
    states of RNNs, weights that a layer assigns in its call. Your own variables and metrics go on.
    The model's own losses, such as weight regularisation, are added to the loss.

    With `accumulate=k` each call takes one micro-batch, and every k-th call decides once over the mean gradient of
    the k: equal to the large batch, except for rounding and BatchNorm, whose statistics are of micro-batches. If their
    sizes differ, return a `WeightedLoss`. A micro-batch that overflows makes the window a skipped step. A window that
    the data does not fill stays open, unless it is ended: see `last_window`.

    Args:
        model: A Keras model.
        loss_fn: `(y, prediction) -> scalar`, or `(y, prediction, sample_weight) -> scalar` for batches with weights:
            the mean over the examples it is given, which on several replicas are one replica's. A `keras.losses.Loss`
            is such a function, and may be called inside of one; its name stands for it, as for Keras's `compile`, such
            as "mse". In place of the mean it may return a `WeightedLoss`.
            In a graph it is traced a second time, to find the cause of skipped steps: to read other values, return them
            with the loss, in a dict, and do not keep tensors in an object.
            For a model with several outputs, a dict of such functions by the outputs' names, or a list in their order:
            they are added up, and the step also returns each, as "name_loss" or "loss_0".
        optimizer: A Keras optimizer, its name as for Keras's `compile`, or a function `(grads, variables) -> None`.
        loss_weights: A factor for each loss of a dict or list, in the same structure. Default: 1.
        loss_scaler: Scales the loss; or a strategy, for a scaler of its own. Without one it is
            `scaler.LossScaler(scaler.Dynamic())` for a model with a layer that computes in float16, and
            `scaler.LossScaler(scaler.NoScaling())` for any other, and with `layerwise`.
        accumulate: Micro-batches per step; or a dict from a number of steps that the scaler has applied to the
            micro-batches per step from there on, such as `{0: 1, 1000: 4}`. With more than one the cause of a skip is
            never BACKWARD, see `jit_compile`.
        last_window: What becomes of a window that is not full when `Loop.run` reaches its goal, or the end of a dataset
            that knows its number of batches: "keep" leaves it open for the next run, "apply" applies the mean of its
            micro-batches. A run that an action stops, or whose data ends unforeseen, leaves it open.
        clip_norm: Largest global norm of the unscaled gradients, or None.
        clip: `scaler.ClipByNorm(1.0)` or `scaler.ClipByValue(1.0)` instead of `clip_norm`, or None.
        jit_compile: Whether XLA compiles the forward and backward pass, and nothing else, so that it also works on
            several replicas. The cause of a skip is then never BACKWARD, see `scaler.Cause`. The same holds if XLA
            compiles the whole step, since finding this cause would keep every activation, and on several replicas with
            a BatchNorm that synchronises its statistics.
        allow_16bit_updates: Train 16-bit variables without masters, unsafely: see `scaler.LossScaler.apply`.
        masters: A function from the model's trainable variables to the masters of the 16-bit ones:
            `scaler.weights.KahanWeights`, `scaler.weights.StochasticRounding` or a function that calls one of them. By
            default `scaler.MasterWeights` if there are 16-bit variables.
        layerwise: The `Layerwise` that `scaler.layerwise.insert_rescales` returned with `model`: a scale for each group
            of its layers, which moves at every micro-batch. The cause of a skip is then never BACKWARD.
        probes: What `scaler.observe.watch` returned for `model`, measured in every step; not with `layerwise`.
        retry: Whether a scaled backward pass that overflows is repeated in the same step, at the scale that the
            strategy backs off to, so that no batch is lost. BatchNorm, Dropout and the loss are those of the first
            forward pass. Not with `layerwise` or `probes`, nor on several replicas with a BatchNorm that synchronises
            its statistics.

    Attributes:
        accumulate: The most micro-batches of a step.
        windows: Micro-batches per step, by the number of applied steps from which they hold.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    _SETTINGS = (
        *("model", "optimizer", "masters", "loss_fn", "loss_scaler", "layerwise", "clip_norm", "clip"),
        *("accumulate", "windows", "window", "last_window", "allow_16bit_updates", "retry"),
    )

    def __init__(
        self,
        model: keras.Model,
        loss_fn: Any,
        optimizer: Any,
        *,
        loss_weights: Any = None,
        loss_scaler: scaler.LossScaler | scaler.Strategy | None = None,
        accumulate: int | Mapping[int, int] = 1,
        last_window: str = "keep",
        clip_norm: float | None = None,
        clip: scaler.ClipByNorm | scaler.ClipByValue | None = None,
        jit_compile: bool = False,
        allow_16bit_updates: bool = False,
        masters: Callable[[list], scaler.MasterWeights] | None = None,
        layerwise: scaler.layerwise.Layerwise | None = None,
        probes: scaler.observe.Watch | None = None,
        retry: bool = False,
    ):
        super().__init__(name="train_step")
        loss_fn = as_loss_function(model, loss_fn, loss_weights)
        check_parts(model, loss_fn)
        loss_scaler = as_loss_scaler("TrainStep", loss_scaler)
        check_accumulate(accumulate, last_window)
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer = as_optimizer("TrainStep", optimizer)
        self.loss_scaler = loss_scaler or default_scaler([model] if layerwise is None else [])
        self._unscaled_by_default = loss_scaler is None and layerwise is None and not computes_in_float16(model)
        self.windows = {0: accumulate} if isinstance(accumulate, int) else dict(accumulate)
        self.accumulate, self.last_window = max(self.windows.values()), last_window
        self.clip_norm = clip_norm
        self.clip = clip
        self.allow_16bit_updates = allow_16bit_updates
        check_masters(masters, allow_16bit_updates, layerwise)
        check_scaling(model, optimizer, self.loss_scaler, layerwise)
        scaler.authoring.check_arguments(optimizer, clip_norm=clip_norm, clip=clip, who="TrainStep")
        self._make_masters, self.layerwise = masters, layerwise
        check_retry(retry, layerwise, jit_compile, probes)
        self.retry = retry
        clipped = ("clipped_tensors",) if clips_by_tensor(self.loss_scaler) else ()
        self._limits = (*scaler.authoring.spike_limits(self.loss_scaler), *clipped)
        self._jit_compile = jit_compile
        self._compiled = self._make_compiled()
        check_probes(probes, model, layerwise)
        self._probing = Probing(probes)
        self._state = scaler.authoring.LayerState([model])
        self.masters: scaler.MasterWeights | None = None
        self.window: MicroBatches | None = None
        self._ready, self._traced = bool(model.built), False
        if self._ready:
            # Creating variables during a trace would cause a second trace.
            self._create_state()

    def __repr__(self) -> str:
        optimizer = getattr(self.optimizer, "name", None) or getattr(self.optimizer, "__name__", "a function")
        window = f", {self.accumulate} micro-batches to a step" if self.accumulate > 1 else ""
        return f"TrainStep of model {self.model.name!r} with {optimizer}{window}; {self.loss_scaler!r}"

    def __call__(self, batch: Any) -> dict[str, tf.Tensor]:
        """Takes one (micro-)batch.

        Args:
            batch: `(x, y)` or `(x, y, sample_weight)`.

        Returns:
            Scalars. `loss`: float32, unscaled. `attempted`: bool, whether a decision was taken, which happens at the
            last micro-batch of a window. `applied`: bool, whether the weights moved. `loss_scale`: float32, the scale
            of this call. `grad_norm` and `clipped_norm`: float32, the global norm of the unscaled gradients before and
            after clipping; both NaN if no step was attempted, the second also if it was skipped. `cause`: int64,
            why the step was skipped, a `scaler.Cause`; NONE, 0, if it was applied or not attempted. `variable`:
            int64, the position in `model.trainable_variables` of the variable to look at first, see
            `scaler.Outcome.variable`; for a window, that of the first micro-batch that was not finite. It is -1 if the
            step was applied or not attempted, or if a slot of the optimizer was not finite. `swallowed`, if the masters
            measure it: float32, the share of the last applied step's updates that was lost in rounding to 16 bits.
            `retries`, with `retry`: int64, how often the gradients were taken again; `loss_scale` is then that of the
            last time. `norm_limit` and `loss_limit`, with a `scaler.SpikeGuard`: float32, above which this step is a
            spike. `clipped_tensors`, if that guard clips by tensor: int64, how many gradients it clipped. And the
            scalars that the loss function added.

            With `probes` also vectors, with a row for each of `probes.names`. `counts`: int64 [rows, 280], see
            `scaler.observe.exponents`. `amax`: float32 [rows], the largest magnitude; infinity or NaN if there is one.
            Both are 0 in calls that `every` leaves out. With the kind "updates" also `swallowed_updates`: float32
            [trainable variables], the share of the nonzero updates for which w + dw == w in the variable's dtype; NaN
            if the step was not applied, and for variables without a master, whose update is not observed. With kinds
            of `scaler.observe.GAUGES` also their outputs, float32 with a number for each name in `probes.gauges`; NaN
            in calls that `every` leaves out.

        Raises:
            BadBatch: If the model or the loss cannot take the batch.
            scaler.InvalidArgument: For a batch of other parts; for a loss that depends on no weight; after layers were
                frozen, unfrozen, added or removed; and, in a compiled function, after an attribute was set that its
                trace has fixed.
            BadOutputs: If the loss function did not return a scalar, or a scalar and a dict.
        """
        x, y, sample_weight = parts(batch)
        with explaining("TrainStep", self.model, x, y), means():
            return self._take(x, y, sample_weight)

    def names_of_weights(self) -> list[str]:
        """The paths of the model's trainable variables."""
        return [variable.path for variable in self.model.trainable_variables]

    def owners_of_windows(self) -> list[Any]:
        """The step itself."""
        return [self]

    def end_window(self) -> None:
        """Has the next micro-batch end its window, full or not. Call it before the last batch of your own loop.

        A `Loop` does so by itself. It assigns a variable: nothing is traced again, also if a graph calls it.

        Raises:
            scaler.InvalidArgument: For a step without `last_window="apply"`, or before its model is built.
        """
        if self.last_window != "apply":
            raise scaler.InvalidArgument(
                "TrainStep.end_window: this step keeps windows that are not full. Make it with accumulate= and "
                'last_window="apply".'
            )
        if self.window is None:
            raise scaler.InvalidArgument(
                f"TrainStep.end_window: model {self.model.name!r} is not built, so there is no window yet. Build it "
                "first, as by keras.Input, or call it once."
            )
        self.window.ends.assign(True)

    def _layers_now(self) -> dict[str, tuple]:
        return {"the model's layers": layers_in([self.model])}

    @contextlib.contextmanager
    def retraced(self, *, jit_compile: bool = True) -> Iterator[None]:
        """Within this context a step with `jit_compile` traces its forward and backward pass again.

        XLA's compiled code otherwise ignores later changes of the model's dtype policies and of the loss function.

        Args:
            jit_compile: False to run without XLA instead.
        """
        before, self._compiled = self._compiled, self._make_compiled() if jit_compile else None
        try:
            yield
        finally:
            self._compiled = before

    def _make_compiled(self) -> Callable | None:
        if not self._jit_compile:
            return None
        return tf.function(lambda *arguments: self._pass(*arguments), jit_compile=True)

    @property
    def probes(self) -> scaler.observe.Watch | None:
        """The tensors to measure, or None. It may be set until the step is traced."""
        return self._probing.watch

    @probes.setter
    def probes(self, watch: scaler.observe.Watch | None) -> None:
        self._check_not_traced("probes")
        check_probes(watch, self.model, self.layerwise)
        check_retry(self.retry, self.layerwise, self.jit_compile, watch)
        self._probing = Probing(watch)

    @property
    def sparse_gradients(self) -> frozenset[str]:
        """The rows of `probes` that are gradients of the type `tf.IndexedSlices`, which are summed in float32."""
        return self._probing.sparse

    @property
    def jit_compile(self) -> bool:
        """Whether XLA compiles the forward and backward pass. It may be set until the step is traced."""
        return self._jit_compile

    @jit_compile.setter
    def jit_compile(self, compiles: bool) -> None:
        self._check_not_traced("jit_compile")
        check_retry(self.retry, self.layerwise, compiles, self.probes)
        self._jit_compile = compiles
        self._compiled = self._make_compiled()

    def _check_not_traced(self, name: str) -> None:
        if self._traced:
            raise scaler.InvalidArgument(f"TrainStep.{name}: the step is already traced. Set it before the first call.")

    @scaler.authoring.no_autograph
    def _take(self, *batch: Any) -> dict[str, tf.Tensor]:
        self._build(batch[0])
        self._keep_as_traced(
            f"TrainStep of model {self.model.name!r}",
            "Make a new TrainStep and a new optimizer after setting `trainable`: the masters belong to the step.",
        )
        self._traced = True
        self._probing.build(self.windows)
        compiled = self._compiled
        (result,) = take_step(
            [Group([self._role(*batch)], self.window, self._length, NO_RETRY if self.retry else None)],
            self._forward(batch[0]),
            models=[self.model],
            state=self._state,
            inputs=batch[0],
            compiled=compiled and (lambda due: compiled(due, *batch)),
        )
        decided = result.decided
        assert decided is not None  # It is always its turn.
        self._state.check(decided.applied)
        outputs = {**result.outputs[0], "cause": decided.cause, "variable": decided.variable}
        if (swallowed := getattr(self.masters, "swallowed", None)) is not None:
            outputs["swallowed"] = swallowed
        return {name: outputs[name] for name in (*OUTPUTS, *outputs) if name in outputs}

    def _build(self, x: Any) -> None:
        if self._ready:
            return
        examples = tf.nest.map_structure(tf.type_spec_from_value, x)

        def build(strategy: tf.distribute.Strategy) -> None:
            del strategy
            # Masters copy initial values, which exist only for variables created outside of the graph.
            with scaler.authoring.outside_the_graph():
                if not self.model.built:
                    self.model(tf.nest.map_structure(_zeros, examples), training=False)
                self._create_state()

        tf.distribute.get_replica_context().merge_call(build)
        self._ready = True

    def _create_state(self) -> None:
        scaler.authoring.warn_of_narrow_statistics(self.model)
        self._trainable = scaler.weights.TrainableSet.of(self.model.weights)
        variables = self.model.trainable_variables
        if not variables:
            raise scaler.InvalidArgument(f"TrainStep: model {self.model.name!r} has no trainable variables.")
        if self._unscaled_by_default:
            check_late_layers(self.model)
        if self._make_masters:
            self.masters = self._make_masters(variables)
            check_made_masters(self.masters, variables)
        elif not self.allow_16bit_updates and has_16bit(variables):
            self.masters = scaler.MasterWeights(variables)
        if self.accumulate > 1:
            early = self.last_window == "apply"
            self.window = MicroBatches(self.windows, variables, scaler.state_of(self.model), early)

    def _role(self, x: Any, y: Any, sample_weight: Any) -> Role:
        del x
        taken = (*OUTPUTS, *(PROBED if self.probes else ()), *self._limits)

        def read(prediction: Any) -> Loss:
            arguments = (y, prediction) if sample_weight is None else (y, prediction, sample_weight)
            found = read_loss(as_loss(self.loss_fn)(*arguments), taken)
            scaler.authoring.check_precision(self.loss_scaler, prediction, found.shown)
            return found

        return Role(
            "",
            self.loss_scaler,
            self.optimizer,
            self.model.trainable_variables,
            self.masters,
            [self.model],
            read,
            f"TrainStep: the loss gives no gradient: it depends on none of the trainable variables of model "
            f"{self.model.name!r}. Compute it from the prediction, the second argument of the loss function, without "
            "tf.stop_gradient, NumPy, tf.argmax or a cast to integers in between, also in the model; and do not freeze "
            "the layers that the prediction comes from.",
            self._probing,
            self.clip_norm,
            self.clip,
            self.allow_16bit_updates,
            self.layerwise,
        )

    @scaler.authoring.no_autograph
    def _pass(self, due: tf.Tensor | None, *batch: Any) -> Taken:
        """The forward and backward pass that XLA compiles."""
        return take([self._role(*batch)], self._forward(batch[0]), self._length, turns=[True], due=[due])[0]

    def _forward(self, x: Any) -> Callable[[], Any]:
        return lambda: scaler.authoring.with_user_autograph(self.model)(x, training=True)

    @property
    def _length(self) -> int | tf.Tensor:
        """Micro-batches of this window."""
        return self.window.length(self.loss_scaler.counters.applied) if self.window else 1


NO_RETRY = (
    "TrainStep(retry=True): the gradients of this step can be taken only once, because it calls Python (a "
    "tf.py_function), or because a BatchNorm synchronises its statistics over replicas. Do without retry."
)
"""Why a step that is traced cannot be retried."""


def _zeros(spec: Any) -> tf.Tensor | tf.RaggedTensor:
    zeros = tf.zeros([size or 1 for size in spec.shape], spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensor.from_tensor(zeros, ragged_rank=spec.ragged_rank)
    return zeros
