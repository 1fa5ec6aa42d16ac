"""One fingerprint for all weights of a model, to tell whether two runs ended in the same place."""

from __future__ import annotations

import hashlib

import keras
import numpy as np


def weights_digest(model: keras.Model) -> str:
    """SHA-256 over the bytes of all of the model's variables, in hexadecimal.

    The order is `model.variables`: layer by layer, trainable ones before the others, seed generators included. Of each
    variable the dtype and shape are hashed, then the values in C order, little-endian. Names are left out: Keras
    numbers them by how many layers a process has made.
    """
    digest = hashlib.sha256()
    for variable in model.variables:
        values = np.ascontiguousarray(variable.numpy())
        digest.update(f"{values.dtype.name} {values.shape}\n".encode())
        if values.dtype.kind in "iuf":
            values = values.astype(values.dtype.newbyteorder("<"))
        digest.update(values.tobytes())
    return digest.hexdigest()
