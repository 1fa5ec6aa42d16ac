"""Says why there is no further batch."""

from __future__ import annotations

_EMPTY = "{what} is empty: it gave no batch. Is the batch larger than the data, with drop_remainder?"
END = "End of sequence"
"""Part of TensorFlow's message at the end of a dataset."""


def why_empty(what: str) -> str:
    """Of data that never gave a batch."""
    return _EMPTY.format(what=what)


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
