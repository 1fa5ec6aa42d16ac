"""The rig in every mode and style, as it was when it was made."""

import fault_cases
import pytest


@pytest.fixture(params=fault_cases.RIGS, ids="-".join)
def rig(request):
    return fault_cases.rig(*request.param).reset()
