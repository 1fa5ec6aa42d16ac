"""Counts in sentences: the noun and the verb agree with the number."""

from __future__ import annotations


def amount(count: float, noun: str, form: str = ",") -> str:
    """Such as "1 step", "1,000 steps" and "0.5 octaves".

    Args:
        count: Not negative.
        noun: In the singular, with a plural in "s".
        form: Of the number, as `format` takes it.
    """
    number = f"{count:{form}}"
    return f"{number} {noun}{'' if number == '1' else 's'}"


def agreeing(count: int, one: str, many: str) -> str:
    """The form of a verb for so many, such as "was" or "were"."""
    return one if count == 1 else many
