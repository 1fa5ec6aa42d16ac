"""What tests of lint share."""

import pytest

from loops.diagnose.lint import stress


@pytest.fixture
def unstressed(monkeypatch):
    """Leaves out what takes time and is tested in `test_lint.py`."""
    monkeypatch.setattr(stress, "stress", lambda call, limit: [])
