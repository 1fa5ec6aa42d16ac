"""All uses of private names of TensorFlow and Keras in `loops`."""

import keras
import tensorflow as tf


def versions() -> str:
    """The installed versions of Keras and TensorFlow, in words."""
    return f"Keras {keras.__version__} on TensorFlow {tf.__version__}"
