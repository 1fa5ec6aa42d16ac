"""The rig in every mode and style, as it was when it was made."""

import fault_cases
import pytest


@pytest.fixture(params=fault_cases.MODES)
def mode(request):
    return request.param


@pytest.fixture(params=fault_cases.STYLES)
def style(request):
    return request.param


@pytest.fixture
def rig(style, mode):
    return fault_cases.rig(style, mode).reset()
