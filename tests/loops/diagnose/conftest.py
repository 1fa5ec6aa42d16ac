"""What several tests of diagnoses leave out, since it takes time and has tests of its own."""

import pytest

from loops.diagnose.explain import case, explain, trials
from loops.diagnose.lint import stress


@pytest.fixture
def unstressed(monkeypatch):
    """Leaves out what is tested in `test_lint.py`."""
    monkeypatch.setattr(stress, "stress", lambda call, limit: [])


@pytest.fixture
def tried(monkeypatch):
    """Has explanations try the remedies of some kinds alone, of the first learning rates those that are named.

    For each the step is traced again.
    """

    def only(*kinds, rates=()):
        if rates:
            monkeypatch.setattr(case, "_FIRST_RATES", rates)
        for module, table in (
            (explain, "AT_THE_STEP"),
            (explain, "OF_THE_UPDATE"),
            (trials, "SINCE_THE_CHECKPOINT"),
        ):
            monkeypatch.setattr(module, table, tuple(row for row in getattr(module, table) if row.kind in kinds))

    return only
