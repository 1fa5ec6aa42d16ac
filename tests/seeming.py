"""Has TensorFlow say that there is a GPU."""

import contextlib
from unittest import mock

import tensorflow as tf

_DEVICES = tf.config.list_physical_devices


@contextlib.contextmanager
def seeming_gpu():
    """Inside of it what is traced is for a GPU."""
    card = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")

    def devices(device_type=None):
        return [*_DEVICES(device_type), *([card] if device_type in (None, "GPU") else [])]

    with mock.patch.object(tf.config, "list_physical_devices", devices):
        yield
