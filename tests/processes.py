"""Processes that tests start and kill, forked from a server that has imported TensorFlow but not used it.

A start costs its trace alone.
"""

import functools
import multiprocessing.forkserver
import signal
import time


@functools.cache
def server():
    """Where processes come from. It imports while this process goes on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tensorflow", "keras", "loops", "halfstep.commands.train"])
    multiprocessing.forkserver.ensure_running()
    return context


def start(target, *arguments):
    """Starts `target(*arguments)` in a process of its own."""
    process = server().Process(target=target, args=arguments)
    process.start()
    return process


def wait_for(happened, seconds=120, process=None, pause=0.001):
    """Waits; whether it happened before the process ended and the time was over."""
    limit = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > limit or (process is not None and not process.is_alive()):
            return False
        time.sleep(pause)
    return True


def kill_when(happened, target, *arguments):
    """Starts a process that has no end of its own, and kills it once that happened."""
    process = start(target, *arguments)
    assert wait_for(happened, process=process, pause=0.0)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
