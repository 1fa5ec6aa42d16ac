"""What must be the same on resume: what a checkpoint says of its run, compared with this run.

facts                                                     if they differ
workers, variables, tables, which weights are trained     the run is refused
the class of an optimizer, or of a strategy but the       the run is refused
  step's own; a rate against a schedule; the windows
  of a step's parts
other parts of `identity`                                 the run is refused, unless `changed=` names them
`settings`                                                a warning, unless `changed=` names them, or the identity
                                                          says the same
names of variables                                        a warning, where values would be exchanged
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import scaler
from loops.loop.state.described import optimizers_of
from loops.step.user_steps import named_by
from loops.support.errors import CheckpointError

_WORKERS = "workers"
"""The fact that `changed=` cannot name: each worker has checkpoints of its own."""
_SCALER, _STRATEGY = "loss_scaler", "strategy"
"""What a user calls the loss scaler's strategy, and what the facts of a checkpoint call it."""


class Resumed(NamedTuple):
    """Where a run went on.

    Attributes:
        step: The step of the checkpoint.
        changes: What differs from there on, as sentences.
    """

    step: int
    changes: tuple[str, ...]


class Unlike(NamedTuple):
    """What of a checkpoint is not restored as it was saved.

    Attributes:
        apart: The groups of variables that start over.
        replicas: Whether the variables have other numbers of components.
        restart: The batches of the dataset that are passed over from its beginning; None if its position is restored.
    """

    apart: frozenset[str] = frozenset()
    replicas: bool = False
    restart: int | None = None

    def explains(self, setting: str) -> bool:
        """Whether a setting is another one because of that."""
        batches = self.restart is not None and setting.endswith(".batch_size")
        return batches or (self.replicas and setting == "Loop.jit_compile")


AS_SAVED = Unlike()
"""Everything is restored as it was saved."""


class Changes:
    """The settings that may differ from those of a checkpoint.

    Args:
        names: Those of arguments, such as `learning_rate` or `loss_scaler`, or of a checkpoint's facts.

    Raises:
        scaler.InvalidArgument: If they are no names, or those of what cannot be changed.
    """

    def __init__(self, names: Sequence[str]) -> None:
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise scaler.InvalidArgument(
                f"Checkpoint(changed={names!r}): expected a list of names, such as ['learning_rate', 'clip_norm']."
            )
        if _WORKERS in names:
            raise scaler.InvalidArgument(
                f"Checkpoint(changed={list(names)!r}): a run does not go on with another {_WORKERS}, since each worker "
                "has checkpoints of its own: expected names of other settings, such as 'learning_rate'."
            )
        self.names = tuple(names)

    def are(self, fact: str) -> bool:
        """Whether a fact of a checkpoint may differ.

        Args:
            fact: Its name, with those that it is part of: `optimizer.learning_rate`.
        """
        return any(_is_part(fact, name) for name in self.names)

    def check(self, known: Iterable[str]) -> None:
        """Checks that each name is that of a fact.

        Raises:
            scaler.InvalidArgument: If one is not.
        """
        facts = list(known)
        for name in self.names:
            if not any(_is_part(fact, name) for fact in facts):
                there = sorted({fact.split(".")[-1] for fact in facts} - {_WORKERS, _STRATEGY} | {_SCALER})
                raise scaler.InvalidArgument(
                    f"Checkpoint(changed={list(self.names)!r}): this run has no setting {name!r}: expected some of "
                    f"{', '.join(there)}."
                )


NO_CHANGES = Changes(())
"""Of a run that goes on as it was."""


def check_identity(
    path: str, saved: Mapping, here: Mapping, meant: Changes = NO_CHANGES, besides: Sequence[str] = ()
) -> dict[str, str]:
    """Compares two identities.

    Args:
        path: Of the checkpoint.
        saved: That in it.
        here: That of this run.
        meant: What may differ.
        besides: Sentences about settings that differ, too, for the message.

    Returns:
        What differs and is meant to, by name, as sentences.

    Raises:
        CheckpointError: If they differ otherwise; the message names what does.
    """
    kinds = _step_of(saved), _step_of(here)
    apart = () if kinds[0] == kinds[1] else _OF_A_STEP
    then, now = (flat({name: value for name, value in facts.items() if name not in apart}) for facts in (saved, here))
    said = _said(then, now, {**then, **now})
    others = [sentence for name, sentence in said.items() if not meant.are(name)]
    if apart:
        also = f" Besides, {'; '.join(others)}." if others else ""
        raise CheckpointError(
            f"{path} belongs to another run: it holds the variables of {kinds[0]}, and this run has {kinds[1]}, which "
            f"keeps them otherwise.{also} Resume with the kind of step of that run, or choose another folder."
        )
    if others:
        way = _way_out(list(said), meant, then, now)
        raise CheckpointError(
            f"{path} belongs to another run: {'; '.join([*besides, *others])}. Use the options of that run, or "
            f"choose another folder.{way}"
        )
    return said


_OF_A_STEP = ("strategy", "optimizer", "accumulate", "clip_norm", "clip", "parts")
"""The facts that only some kinds of steps have."""


def _step_of(facts: Mapping) -> str:
    """What a train step is called, as far as an identity tells."""
    if "parts" in facts:
        return f"an hs.ComposedStep of {', '.join(map(repr, sorted(facts['parts'])))}"
    return "an hs.TrainStep" if set(_OF_A_STEP[:4]) <= set(facts) else "a step of your own"


def differences(saved: Mapping, here: Mapping) -> dict[str, str]:
    """The settings that both programs have with different values, by name, as sentences with both."""
    then, now = _named_as_given(saved), _named_as_given(here)
    return _said(then, now, [name for name in then if name in now])


def _said(then: Mapping, now: Mapping, names: Iterable[str]) -> dict[str, str]:
    """Those of the facts that differ, as sentences with both values."""
    different = [name for name in names if not _same(then.get(name), now.get(name))]
    return {name: f"{name} was {then.get(name)!r} and is {now.get(name)!r}" for name in different}


def meant_changes(path: str, saved: Mapping, identity: Mapping, here: Mapping, meant: Changes) -> dict[str, str]:
    """What of a run's identity is meant to differ, as `check_identity` returns it.

    Args:
        path: Of the checkpoint.
        saved: The facts in it.
        identity: That of this run.
        here: The settings of this program.
        meant: What may differ.

    Raises:
        CheckpointError: If something else differs; the message begins with the dtype policies, where they do.
        scaler.InvalidArgument: If something else differs, and one of the names is that of no setting.
    """
    policy = differences(saved["settings"], here).get("layers.dtype_policy")
    try:
        return check_identity(path, saved["identity"], identity, meant, [policy] if policy else [])
    except CheckpointError:
        # It may be a misspelled name of what differs.
        known = (saved["identity"], saved["settings"], identity, here, {"Loop.jit_compile": None})
        meant.check(name for one in known for name in flat(one))
        raise


def other_rates(train_step: object, saved: Mapping) -> list[str]:
    """What the learning rates are that changed schedules give, and what they were to be, as sentences.

    Args:
        train_step: Any callable, whose optimizers are restored.
        saved: What `settings` returned in the program that saved them. It tells Keras's own schedules.
    """
    found = []
    for name, optimizer in optimizers_of(train_step).items():
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError, tf.errors.OpError):
            then = saved[name]["learning_rate"]
            schedule = getattr(keras.optimizers.schedules, then["class_name"]).from_config(then["config"])
            before, now = float(schedule(optimizer.iterations)), float(optimizer.learning_rate)
            at = f"at update {int(optimizer.iterations)} of {name}"
            found += [f"{at} the learning rate was to be {before:g}, and is {now:g}."] if not _same(before, now) else []
    return found


_UNSET_SEED = 87654321
"""What TensorFlow pairs with the seed of an operation where no global seed is set."""


def _named_as_given(facts: Mapping) -> dict[str, Any]:
    """Settings without nested dicts, with both seeds of an operation of a dataset by the names of a program."""
    found = flat(facts)
    for name in [name for name in found if f"{name}2" in found and name.endswith(".seed")]:
        seed, found[name] = found[name], found.pop(f"{name}2")
        found[f"the global seed (tf.random.set_seed) of {name[:-5]}"] = None if seed == _UNSET_SEED else seed
    return found


def _way_out(facts: Sequence[str], meant: Changes, saved: Mapping, here: Mapping) -> str:
    """How to go on with differences that are meant, as a sentence; why not, if some cannot be changed."""
    fixed = next(filter(None, (why_fixed(fact, saved, here) for fact in facts)), None)
    if fixed:
        return f" No changed= helps: {fixed}"
    names = list(dict.fromkeys(_argument(fact) for fact in facts if not meant.are(fact)))
    if _WORKERS in names:
        return ""
    asked = " ".join(f"--changed {name}" for name in names)
    return f" If that is meant, say so: Checkpoint(..., resume=True, changed={names!r}), on the command line {asked}."


def _argument(fact: str) -> str:
    """What a user calls a fact: the part of its name that is an argument."""
    parts = fact.split(".")
    place = {"optimizer": 1, "run": 1, "parts": 2}.get(parts[0], 0)
    name = parts[place] if place < len(parts) else parts[0]
    return _SCALER if name == _STRATEGY else name


def _is_part(fact: str, name: str) -> bool:
    wanted = _STRATEGY if name == _SCALER else name
    return wanted in fact.split(".") or f"{fact}.".startswith(f"{wanted}.")


def constant_rates(train_step: object) -> Callable[[], None]:
    """Keeps the constant learning rates of a step's optimizers. Returns a function that assigns them again."""
    optimizers = named_by(train_step, keras.optimizers.Optimizer)
    constant = [one for one in optimizers if isinstance(one.get_config().get("learning_rate"), int | float)]
    rates = [float(one.learning_rate) for one in constant]

    def assign() -> None:
        for optimizer, rate in zip(constant, rates, strict=True):
            optimizer.learning_rate = rate

    return assign


def is_another_strategy(saved: object, here: object) -> bool:
    """Whether two strategies, as text, are of other classes, so that the state of one means nothing to the other."""
    then, now = (re.findall(r"\w+(?=\()", str(text)) for text in (saved, here))
    return then != now


def why_fixed(fact: str, saved: Mapping, here: Mapping) -> str | None:
    """Why a run cannot go on with another value of a fact, and what to do instead; None if it can.

    Args:
        fact: Its name.
        saved: The facts then, without nested dicts.
        here: The facts now.
    """
    then, now = saved.get(fact), here.get(fact)
    if fact == "accumulate" and any(name.startswith("parts.") for name in here):
        return (
            f"it was saved with ComposedStep(accumulate={then}), and this run has accumulate={now}: its parts take "
            "turns by windows of that size. Use that of the run; only a TrainStep can change it."
        )
    is_strategy = fact.endswith(f".{_STRATEGY}") or fact.startswith("PerLoss")
    if fact.endswith("optimizer.class") or (is_strategy and is_another_strategy(then, now)):
        return f"the state of {then!r} means nothing to {now!r} ({fact}). {_WEIGHTS_ALONE}"
    if fact.endswith("learning_rate") and isinstance(then, int | float) != isinstance(now, int | float):
        return f"a constant rate is a variable of the optimizer, and a schedule is none ({fact}). {_WEIGHTS_ALONE}"
    return None


_WEIGHTS_ALONE = (
    "To go on with the weights alone, resume once as that run was, call model.save_weights, and load them in a new run "
    "with another folder."
)


def _same(then: object, now: object) -> bool:
    """Whether two values are the same. NaN equals NaN, also in lists."""
    return then == now or json.dumps(then) == json.dumps(now)


def flat(facts: Mapping, prefix: str = "") -> dict[str, Any]:
    """A dict without nested dicts: the names of a path are joined with dots."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        found.update(flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value})
    return found
