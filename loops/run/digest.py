"""A hash over all weights of a model, to check whether two runs ended with the same bits."""

from __future__ import annotations

import hashlib

import keras
import numpy as np


def weights_digest(model: keras.Model) -> str:
    """SHA-256 over the bytes of all of the model's variables, in hexadecimal.

    The order is `model.variables`: layer by layer, trainable ones before the others, seed generators included. For each
    variable the dtype and shape are hashed, then the values in C order, little-endian. Names are left out: Keras
    numbers layers per process.
    """
    digest = hashlib.sha256()
    for variable in model.variables:
        values = np.ascontiguousarray(variable.numpy())
        digest.update(f"{values.dtype.name} {values.shape}\n".encode())
        if values.dtype.kind in "iuf":
            values = values.astype(values.dtype.newbyteorder("<"))
        digest.update(values.tobytes())
    return digest.hexdigest()
