"""The search among all living Python objects: what it finds, and that other threads do not notice it."""

import gc
import inspect
import threading
import time

import keras

from scaler.backend import layers

alive = inspect.unwrap(layers.alive)


class Own(keras.layers.Dense):
    pass


def test_it_finds_each_once_whatever_its_age():
    old = [Own(3), keras.layers.Dense(3)]
    gc.collect()
    new = [Own(4), Own(5)]
    *_, found = alive(Own)  # The tests freeze what was imported.
    assert {id(one) for one in (old[0], *new)} <= {id(one) for one in found}
    assert len({id(one) for one in found}) == len(found)
    assert all(type(one) is Own for one in found)
    assert any(one is old[1] for found in alive(keras.layers.Layer) for one in found)


def test_another_thread_makes_tuples_meanwhile():
    """A tuple that grows has to be its maker's alone: Python raises a SystemError otherwise."""
    stop, failed, collects = threading.Event(), [], gc.isenabled()

    def make():
        while not stop.is_set():
            try:
                tuple(number for number in range(200))
            except SystemError as error:
                failed.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            list(alive(Own))
    finally:
        stop.set()
        thread.join()
    assert failed == []
    assert gc.isenabled() is collects
