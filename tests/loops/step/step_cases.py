"""What the tests of steps share: batches as tensors, and parts of few words."""

import keras
import tensorflow as tf
from loop_cases import static
from models import squared_error

import loops


def tensors(given):
    return tuple(map(tf.constant, given))


def part(name, model, loss=None, optimizer=None, scale=None, **arguments):
    """A `Part` of plain SGD, whose loss is the squared error of its model, and its scale is one that never moves."""
    arguments |= {"loss_scaler": static(scale)} if scale else {}
    loss = loss or (lambda pair: squared_error(pair[1], model(pair[0], training=True)))
    return loops.Part(name, model, loss, optimizer or keras.optimizers.SGD(0.1), **arguments)
