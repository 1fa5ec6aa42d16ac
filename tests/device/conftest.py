"""A GPU that TensorFlow only seems to see: what is traced is for it, and runs on the CPU."""

import pytest
from seeming import seeming_gpu


@pytest.fixture
def gpu():
    with seeming_gpu():
        yield
