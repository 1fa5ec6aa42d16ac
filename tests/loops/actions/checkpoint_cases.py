"""Loops with a `Checkpoint` that several tests of checkpoints run."""

import keras
from loop_cases import dataset
from models import plain_model, squared_error

import loops
import scaler


def one_by_one(step, data, checkpoint):
    """A loop without a graph of several steps, which takes longer to trace."""
    return loops.Loop(step, data, steps_per_call=1, actions=[checkpoint])


def training(place, *, model=plain_model, optimizer=None, scaling=None, accumulate=1, clip=None, size=8, **arguments):
    step = loops.TrainStep(
        model(),
        squared_error,
        optimizer or keras.optimizers.SGD(0.1, momentum=0.9),
        loss_scaler=scaler.LossScaler(scaling or scaler.Dynamic(8.0)),
        accumulate=accumulate,
        clip=clip,
    )
    return one_by_one(step, dataset(4, size), loops.Checkpoint(place, every=1, **arguments))
