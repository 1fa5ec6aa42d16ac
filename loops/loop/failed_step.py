"""What an error says of the run: at which step it came, with what batches, and why there is no further batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import scaler


def note(error: Exception, name: str, step: int, element_spec: Any, given: Any = None) -> None:
    """Adds a note to an error (PEP 678), whose own words and type stay. It adds a note once.

    Args:
        error: What was raised while the step was traced or taken.
        name: What the user calls the step.
        step: Its number in the run, from 1.
        element_spec: The shapes and dtypes of its batches, as far as they are known.
        given: Its batch, or one like it, where the host has it: batches of a source may differ from the first. None
            where only the device has.
    """
    # Of the operation that takes a batch from an iterator, eagerly or inside of a call.
    lost = isinstance(error, tf.errors.OpError) and "IteratorGetNext" in error.message
    where = "the dataset, which gave no batch for it" if lost else name
    what = f"batches of {described(element_spec)}" if given is None or lost else f"a batch of {described(given)}"
    add_note(error, f"halfstep: this came at step {step} of the run, in {where}, with {what}.")


def tell_unseen(error: Exception, before: int, after: int) -> None:
    """Has an error say which steps its call took that no action has seen: the outputs of a failed call are lost.

    To keep them would cost every step a write to a variable. One of our own errors says it in its sentence.

    Args:
        error: What ended a call of many steps.
        before: The steps that the run had taken before the call.
        after: Those that it has taken now.
    """
    if after <= before:
        return
    if after == before + 1:
        steps, were, them = f"step {after}", "was", "it"
    else:
        steps, were, them = f"steps {before + 1} to {after}", "were", "them"
    said = (
        f"{steps[0].upper()}{steps[1:]} of the same call {were} taken and counted, but no action has seen {them}: a "
        f"log or a trace of this run lacks {them}. A new process with Checkpoint(resume=True) takes {them} again; with "
        "steps_per_call=1 none is lost."
    )
    if isinstance(error, scaler.ScalerError):
        error.args = (f"{error} {said}",)
    else:
        add_note(error, f"halfstep: {said[0].lower()}{said[1:]}")


def add_note(error: BaseException, said: str) -> None:
    """Adds a note to an error (PEP 678), unless it has the same one."""
    notes = getattr(error, "__notes__", [])
    if said not in notes:
        vars(error)["__notes__"] = [*notes, said]  # `add_note` came with Python 3.11.


def described(element_spec: Any) -> str:
    """The shapes and dtypes of a batch in short, such as "(float32 [8, 3], int64 [8])".

    Args:
        element_spec: A batch, or what is known of several.
    """
    return str(tf.nest.map_structure(_Short, element_spec))


class _Short:
    """One part of a batch."""

    def __init__(self, spec: Any) -> None:
        shape, dtype = getattr(spec, "shape", None), getattr(spec, "dtype", None)
        self._text = type(spec).__name__
        if isinstance(spec, np.ndarray):
            self._text = f"{'string' if spec.dtype.kind == 'O' else spec.dtype.name} {list(spec.shape)}"
        elif isinstance(shape, tf.TensorShape) and isinstance(dtype, tf.DType):
            self._text = f"{dtype.name} {'of any shape' if shape.rank is None else shape.as_list()}"

    def __repr__(self) -> str:
        return self._text


END = "End of sequence"
"""Part of TensorFlow's message at the end of a dataset."""


def why_empty(what: str) -> str:
    """Of data that never gave a batch."""
    return f"{what} is empty: it gave no batch. Is the batch larger than the data, with drop_remainder?"


def why_endless_data_ended(done: int) -> str:
    """Of a dataset whose cardinality is infinite."""
    if not done:
        return why_empty("the dataset")
    return (
        f"the dataset ended after {done} steps, although its cardinality is infinite: a generator that gives its "
        "examples once cannot be repeated. The counters, the weights and what was written are kept; the outputs of the "
        "steps since the last visit are lost."
    )


def why_out_of_data(done: int, steps: int, *, of_source: bool) -> str:
    """Of data that ended before the goal.

    Args:
        done: Steps taken.
        steps: The goal.
        of_source: Whether the data is a source, and no dataset.
    """
    what = "the source of batches" if of_source else "the dataset"
    if not done:
        return why_empty(what)
    remedy = "Have it repeat by itself, as with Grain's repeat()," if of_source else "Let it .repeat(),"
    return (
        f"{what} ended after {done} of {steps} steps. {remedy} or run fewer steps. The steps taken and what was "
        "written are kept."
    )
