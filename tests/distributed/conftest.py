"""What holds for tests on replicas alone."""

import pytest
import tensorflow as tf

OPTIMIZED = ("test_one_replica_overflows.py", "test_like_one_device.py", "test_joined_on_replicas.py")
TIERS = ("exhaustive", "slow")


@pytest.fixture(autouse=True)
def _graphs_as_they_were_traced(request):
    """TensorFlow optimizes a graph anew for each device, which takes a quarter of a test: the quick ones do without.

    What decides a step is the same. Those of `OPTIMIZED` and of the slower tiers run graphs as users do.
    """
    if request.path.name in OPTIMIZED or any(map(request.node.get_closest_marker, TIERS)):
        yield
        return
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
