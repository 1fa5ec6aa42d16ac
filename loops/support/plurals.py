"""Counts and shares in sentences: the noun and the verb agree with the number."""

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


def share(value: float) -> str:
    """A share as a percentage with two significant digits: "8.5%", "0.021%", "<0.001%", "0%", ">99.9%".

    Where two digits would round up to all, one place more is shown: "99.7%".
    """
    if value in (0, 1):
        return f"{value:.0%}"
    if value < 1e-5 or value > 0.999:
        return "<0.001%" if value < 1e-5 else ">99.9%"
    return f"{value:.1%}" if value >= 0.995 else f"{100 * value:.2g}%"
