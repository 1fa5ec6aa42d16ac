"""What steps refuse when they are made, rather than at the first batch; and learning rates by attempted steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

import scaler
from loops.backend.steps import schedule
from loops.step.losses import LOSSES
from loops.support.errors import check, check_count, is_count

if TYPE_CHECKING:
    from loops.step.parts import Part


def computes_in_float16(model: keras.layers.Layer) -> bool:
    """Whether any layer that the model has so far computes in float16."""
    return any(getattr(layer, "compute_dtype", None) == "float16" for layer in scaler.observe.layers_of(model))


def default_scaler(models: Sequence[keras.layers.Layer], name: str = "loss_scaler") -> scaler.LossScaler:
    """The scaler of a step without `loss_scaler=`: only float16 flushes small gradients to zero and needs scaling."""
    scales = any(computes_in_float16(model) for model in models)
    return scaler.LossScaler(scaler.Dynamic() if scales else scaler.NoScaling(), name=name)


def has_16bit(variables: Sequence) -> bool:
    """Whether any variable is stored in 16 bits, and needs a float32 master."""
    return any(variable.dtype in ("float16", "bfloat16") for variable in variables)


def check_late_layers(model: keras.Model) -> None:
    """Refuses float16 in layers that the model created in its build, after the step had chosen not to scale."""
    if computes_in_float16(model):
        raise scaler.InvalidArgument(
            f"TrainStep: model {model.name!r} computes in float16 in layers that it created when it was built, after "
            "the step had chosen no loss scaling for it. Build the model first, or pass loss_scaler=, such as "
            "hs.LossScaler(hs.Dynamic())."
        )


def check_masters(masters: object, allow_16bit_updates: bool, layerwise: object) -> None:
    """Refuses two ways of treating 16-bit variables at once, and a `layerwise` that is not a `Layerwise`."""
    if masters is not None and (allow_16bit_updates or not callable(masters)):
        raise scaler.InvalidArgument(
            f"TrainStep(masters={masters!r}, allow_16bit_updates={allow_16bit_updates!r}): expected a function of the "
            "variables, such as hs.weights.KahanWeights, and not to train 16-bit variables without it as well."
        )
    if layerwise is not None and not isinstance(layerwise, scaler.layerwise.Layerwise):
        raise scaler.InvalidArgument(
            f"TrainStep(layerwise={layerwise!r}): expected the Layerwise that hs.layerwise.insert_rescales returned."
        )


def check_retry(retry: object, layerwise: object, jit_compile: bool, probes: object) -> None:
    """Refuses flags that are no bool, and steps whose gradients cannot be taken again."""
    for name, flag in {"retry": retry, "jit_compile": jit_compile}.items():
        check(f"TrainStep({name}={flag!r})", isinstance(flag, bool), "True or False")
    if retry and layerwise is not None:
        raise scaler.InvalidArgument(
            "TrainStep(retry=True, layerwise=...): each group of layers has a scale of its own, which moves by itself. "
            "Use one of the two."
        )
    if retry and probes is not None:
        raise scaler.InvalidArgument(
            "TrainStep(retry=True, probes=...): probes, which an hs.Trace needs, measure the first backward pass and "
            "not the one that is applied. Use one of the two."
        )
    if retry and jit_compile:
        raise scaler.InvalidArgument(
            "TrainStep(retry=True, jit_compile=True): a pass that is compiled by itself is not repeated. Compile the "
            "whole step: tf.function(step, jit_compile=True), or Loop(step, ..., jit_compile=True)."
        )


def check_made_masters(masters: object, variables: list) -> None:
    """Refuses masters from `masters=` that are not those of the model's own variables."""
    if not isinstance(masters, scaler.MasterWeights):
        raise scaler.InvalidArgument(
            f"TrainStep(masters=...): the function returned {masters!r}: expected an hs.MasterWeights, "
            "hs.weights.KahanWeights or hs.weights.StochasticRounding of the variables it is given."
        )
    own = masters.model_variables
    if len(own) != len(variables) or any(one is not other for one, other in zip(own, variables, strict=True)):
        raise scaler.InvalidArgument(
            "TrainStep(masters=...): the function returned masters of other variables than those it was given, the "
            "trainable ones of this model: pass on its argument, as in lambda variables: "
            "hs.weights.KahanWeights(variables)."
        )


def check_scaling(model: keras.Model, optimizer: Any, loss_scaler: scaler.LossScaler, layerwise: object) -> None:
    """Refuses a model, an optimizer and a scaler that would count or scale one thing twice, or not at all."""
    if layerwise is None and any(
        getattr(layer, "scales_gradients", False) for layer in scaler.observe.layers_of(model)
    ):
        raise scaler.InvalidArgument(
            f"TrainStep: model {model.name!r} has layers of hs.layerwise.insert_rescales, and only their Layerwise "
            "removes those scales from the gradients: expected layerwise=, the second object that insert_rescales "
            "returned."
        )
    check_optimizer("TrainStep", optimizer, loss_scaler)


def as_optimizer(who: str, optimizer: Any) -> Any:
    """The optimizer of an argument: a name stands for Keras's optimizer with its defaults, as in `compile`.

    Args:
        who: The start of the sentence.
        optimizer: An optimizer, a function or a name. `scaler.authoring.check_arguments` looks at it more closely.

    Raises:
        scaler.InvalidArgument: For a name that Keras does not know, and for what cannot move variables.
    """
    optimizer = scaler.authoring.from_keras(keras.optimizers, optimizer)
    if isinstance(optimizer, (list, tuple, dict)):
        raise scaler.InvalidArgument(
            f"{who}: optimizer is a {type(optimizer).__name__}: expected one. For several use an hs.ComposedStep "
            "with a part for each, or hs.apply_together in a step of your own."
        )
    moves = callable(optimizer) or hasattr(optimizer, "apply") or hasattr(optimizer, "apply_gradients")
    if moves and not isinstance(optimizer, type):
        return optimizer
    raise scaler.InvalidArgument(
        f"{who}: optimizer={optimizer!r:.100}: expected a Keras optimizer such as keras.optimizers.Adam(1e-3), the "
        "name of one such as 'adam', or a function of (grads, variables)."
        + scaler.authoring.did_you_mean(optimizer, map(str.lower, dir(keras.optimizers)))
    )


def as_loss_scaler(who: str, loss_scaler: Any, name: str = "loss_scaler") -> scaler.LossScaler | None:
    """The scaler of an argument: a strategy stands for a scaler that uses it.

    Args:
        who: The start of the sentence.
        loss_scaler: A scaler, a strategy or None.
        name: Of a scaler that is made.

    Raises:
        scaler.InvalidArgument: For anything else.
    """
    if loss_scaler is None or isinstance(loss_scaler, scaler.LossScaler):
        return loss_scaler
    if isinstance(loss_scaler, scaler.Strategy) and not isinstance(loss_scaler, type):
        return scaler.LossScaler(loss_scaler, name=name)
    raise scaler.InvalidArgument(
        f"{who}: loss_scaler={loss_scaler!r}: expected an hs.LossScaler, or a strategy such as hs.Dynamic()."
    )


def check_optimizer(who: str, optimizer: Any, loss_scaler: scaler.LossScaler | None) -> None:
    """Refuses an optimizer that accumulates, or whose schedule counts the attempts of another scaler.

    Args:
        who: The start of the sentence.
        optimizer: The optimizer.
        loss_scaler: The scaler whose `apply` gets it; None if it is not known yet.
    """
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise scaler.InvalidArgument(
            f"{who}: the optimizer has gradient_accumulation_steps={optimizer.gradient_accumulation_steps!r}, so "
            f"a step that counts as applied might not move the weights. Leave it out, and pass accumulate= to "
            f"{who.partition(':')[0]}."
        )
    rate = schedule(optimizer)
    if isinstance(rate, ByAttempts) and rate.loss_scaler is not loss_scaler:
        raise scaler.InvalidArgument(
            f"{who}: the optimizer's ByAttempts counts the attempts of another loss scaler: expected the one "
            "that is passed as loss_scaler=."
        )


def check_accumulate(accumulate: object, last_window: object) -> None:
    """Refuses windows that are no number and no schedule, and a last window that nothing can end."""
    if isinstance(accumulate, Mapping):
        counts = all(is_count(applied, 0) and is_count(size) for applied, size in accumulate.items())
        if not counts or 0 not in accumulate:
            raise scaler.InvalidArgument(
                f"TrainStep(accumulate={dict(accumulate)!r}): expected micro-batches per step by the number of applied "
                "steps from which they hold, from 0 on, such as {0: 1, 1000: 4}."
            )
    else:
        check_count(f"TrainStep(accumulate={accumulate!r})", accumulate)
    if last_window not in ("keep", "apply"):
        raise scaler.InvalidArgument(f'TrainStep(last_window={last_window!r}): expected "keep" or "apply".')
    if last_window == "apply" and accumulate == 1:
        raise scaler.InvalidArgument(
            'TrainStep(last_window="apply"): without accumulate= each batch is a window of its own. Leave it out, or '
            "pass accumulate=4."
        )


def check_parts(model: object, loss_fn: object) -> None:
    """Refuses arguments of the wrong kind."""
    if not isinstance(model, keras.Model):
        raise scaler.InvalidArgument(
            f"TrainStep(model={model!r}): expected a keras.Model. For anything else write the step yourself: any "
            "callable from a batch to a dict of scalar tensors is a train step."
        )
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise scaler.InvalidArgument(
            f"TrainStep(loss_fn={loss_fn!r}): expected a function of (y, prediction), or the name of a Keras loss such "
            f"as 'mse'.{scaler.authoring.did_you_mean(loss_fn, LOSSES)}"
        )


def check_composed(parts: Any, forward: Any, loss_scaler: Any, accumulate: Any, retry: Any) -> None:
    """Refuses parts that do not fit together.

    Raises:
        scaler.InvalidArgument: With the names of the parts.
    """
    if forward is not None and not callable(forward):
        raise scaler.InvalidArgument(f"ComposedStep(forward={forward!r}): expected a function of a batch.")
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise scaler.InvalidArgument(f"ComposedStep: the parts are named {', '.join(names)}: expected different names.")
    _refuse_shared(parts, "the variable", lambda part: part.variables)
    _refuse_shared(parts, "the optimizer", lambda part: [part.optimizer])
    _refuse_shared(parts, "the loss scaler", lambda part: [part.loss_scaler] if part.loss_scaler else [])
    _refuse_moved_teachers(parts)
    check_count(f"ComposedStep(accumulate={accumulate!r})", accumulate)
    if not isinstance(retry, bool):
        raise scaler.InvalidArgument(f"ComposedStep(retry={retry!r}): expected True or False.")
    if accumulate > 1 and forward is None:
        raise scaler.InvalidArgument(
            f"ComposedStep(accumulate={accumulate!r}): parts that take turns have no window in common, since each sees "
            "what the one before it has moved. Let them share one forward pass: forward=."
        )
    if loss_scaler is not None:
        _check_one_scaler(parts, forward, loss_scaler)
    for part in parts:
        check_optimizer(f"ComposedStep: part {part.name!r}", part.optimizer, loss_scaler or part.loss_scaler)


def _check_one_scaler(parts: Sequence[Part], forward: Any, loss_scaler: Any) -> None:
    """Refuses one scaler for all parts where they cannot be decided about together."""
    own = [part.name for part in parts if part.loss_scaler is not None]
    turns = [part.name for part in parts if part.every > 1]
    if forward is None:
        why = "parts that take turns are decided about one after the other. Let them share one forward pass: forward=."
    elif own:
        why = f"part {own[0]!r} has a loss scaler of its own: expected one for all, or one for each."
    elif turns:
        why = f"part {turns[0]!r} takes its turn at some calls only: expected every=1 in all, or a scaler for each."
    elif isinstance(loss_scaler.strategy, scaler.SpikeGuard):
        why = "a SpikeGuard looks at the steps of one optimizer. Give each part a scaler of its own."
    else:
        return
    raise scaler.InvalidArgument(f"ComposedStep(loss_scaler=...): one scaler decides about all parts together; {why}")


def _refuse_moved_teachers(parts: Sequence[Part]) -> None:
    """Refuses a teacher that an optimizer moves, or that follows two students."""
    follows: dict[int, str] = {}
    for part in parts:
        for variable in [] if part.teacher is None else part.teacher.weights:
            mover = next((one.name for one in parts if any(own is variable for own in one.variables)), None)
            mover = mover or follows.get(id(variable))
            if mover is not None:
                raise scaler.InvalidArgument(
                    f"ComposedStep: the teacher of part {part.name!r} is moved by part {mover!r}, too: expected a "
                    "model of its own."
                )
        follows |= {} if part.teacher is None else {id(variable): part.name for variable in part.teacher.weights}


def _refuse_shared(parts: Sequence[Part], what: str, of: Callable[[Part], Iterable]) -> None:
    owners: dict[int, str] = {}
    for part in parts:
        for one in of(part):
            if owners.setdefault(id(one), part.name) != part.name:
                name = getattr(one, "path", None) or getattr(one, "name", None) or type(one).__name__
                raise scaler.InvalidArgument(
                    f"ComposedStep: {what} {name!r} is in the parts {owners[id(one)]!r} and {part.name!r}: expected "
                    "it in one of them."
                )


def check_part_probes(probes: Any, parts: Sequence[Part], retry: bool) -> None:
    """Refuses watches that do not belong to the parts.

    Args:
        probes: The argument of `ComposedStep`.
        parts: Its parts.
        retry: Its argument.

    Raises:
        scaler.InvalidArgument: With the name of the part.
    """
    if probes is None:
        return
    names = [part.name for part in parts]
    if not isinstance(probes, Mapping) or not probes or not set(probes) <= set(names):
        raise scaler.InvalidArgument(
            f"ComposedStep(probes={probes!r:.100}): expected a dict of hs.observe.watch(model) by the names of "
            f"parts, of which there are {', '.join(names)}."
        )
    if retry:
        raise scaler.InvalidArgument(
            "ComposedStep(retry=True, probes=...): probes measure the first backward pass and not the one that is "
            "applied. Use one of the two."
        )
    owners: dict[int, str] = {}
    for part in parts:
        if part.name in probes:
            _check_watch(part, probes[part.name])
            other = owners.setdefault(id(probes[part.name]), part.name)
            if other != part.name:
                raise scaler.InvalidArgument(
                    f"ComposedStep(probes=...): the parts {other!r} and {part.name!r} have one watch, whose rows are "
                    "those of one part: expected an hs.observe.watch(...) for each."
                )


def _check_watch(part: Part, watch: Any) -> None:
    if not isinstance(watch, scaler.observe.Watch):
        raise scaler.InvalidArgument(
            f"ComposedStep(probes=...): part {part.name!r} has {watch!r:.100}: expected hs.observe.watch(model)."
        )
    held = {id(variable) for variable in watch.model.variables}
    if not any(id(variable) in held for variable in part.variables):
        raise scaler.InvalidArgument(
            f"ComposedStep(probes=...): part {part.name!r} has a watch of model {watch.model.name!r}, which has none "
            "of the variables that this part moves: expected a watch of a Keras model that has some."
        )


class ByAttempts(keras.optimizers.schedules.LearningRateSchedule):
    """A Keras schedule over the steps that a loss scaler attempted; Keras itself counts only applied steps.

        loss_scaler = scaler.LossScaler(scaler.Dynamic())
        cosine = keras.optimizers.schedules.CosineDecay(1e-3, decay_steps=10_000)
        optimizer = keras.optimizers.Adam(loops.ByAttempts(cosine, loss_scaler))

    With it, a run of n windows ends at the schedule's end, however many of them were skipped. Without it, the schedule
    pauses at every skip, as the optimizer's moments do. It has no state: it reads `loss_scaler.counters`, which are
    saved with the scaler.

    Args:
        schedule: Any function from a step, counted from 0, to a learning rate.
        loss_scaler: The scaler whose `apply` gets the optimizer. If a step calls `apply` several times, pass
            `update=False` and call its `update` once.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    def __init__(self, schedule: keras.optimizers.schedules.LearningRateSchedule, loss_scaler: scaler.LossScaler):
        if not callable(schedule):
            raise scaler.InvalidArgument(
                f"ByAttempts(schedule={schedule!r}): expected a schedule of keras.optimizers.schedules, or a "
                "function of the step."
            )
        if not isinstance(loss_scaler, scaler.LossScaler):
            raise scaler.InvalidArgument(f"ByAttempts(loss_scaler={loss_scaler!r}): expected an hs.LossScaler.")
        self.schedule = schedule
        self.loss_scaler = loss_scaler

    def __call__(self, step: Any) -> Any:
        """The learning rate of the step that is attempted now.

        Args:
            step: The optimizer's step, which is ignored.
        """
        del step
        return self.schedule(self.loss_scaler.counters.attempted)

    def get_config(self) -> dict:
        """The schedule's configuration, for comparing optimizers. The scaler is not part of it."""
        return {"schedule": keras.optimizers.schedules.serialize(self.schedule)}

    @classmethod
    def from_config(cls, config: dict, custom_objects: dict | None = None) -> ByAttempts:
        """Refuses: a configuration has no loss scaler.

        Raises:
            scaler.InvalidArgument: Always.
        """
        raise scaler.InvalidArgument(
            "ByAttempts cannot be made from a configuration, which has no loss scaler: make the optimizer as the run "
            "did, and restore its variables from the checkpoint."
        )
