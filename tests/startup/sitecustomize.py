"""Keeps Keras from importing scikit-learn and matplotlib, for wrappers and pictures that no test uses.

They take a third of the time in which a process imports TensorFlow. Python runs this at the start of each process,
since the Makefile puts its folder on the path of tests. Whoever else imports them gets them.
"""

import importlib.abc
import sys


class _NotForKeras(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("sklearn", "matplotlib"):
            frame = sys._getframe(1)
            while frame is not None and "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            if frame is not None and frame.f_globals.get("__name__", "").startswith("keras."):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, _NotForKeras())
