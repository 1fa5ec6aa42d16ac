"""Finds private names in the source of a package."""

import ast
import functools
import pathlib
import re

MODULES = ("tensorflow.python", "keras.src", "tf.__internal__", "tensorflow.__internal__", "tf.python")
NAMEDTUPLES = {"_replace", "_asdict", "_fields", "_make"}
PRIVATE = re.compile(r"_[a-z]\w*")


@functools.cache
def sources(folder):
    """The path and the parsed source of every file of a folder."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(pathlib.Path(folder).rglob("*.py"))}


@functools.cache
def walked(tree):
    """All nodes of a parsed source, which several searches look through."""
    return list(ast.walk(tree))


def attributes(tree):
    """The private names that are looked up on another object than `self`, `cls` and modules of this package."""
    for node in walked(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and node.attr not in NAMEDTUPLES:
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            yield from [] if own else [node.attr]
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if called in ("getattr", "hasattr", "setattr", "delattr") and len(node.args) > 1:
            named = node.args[1]
            parts = named.values if isinstance(named, ast.JoinedStr) else [named]
            first = parts[0].value if parts and isinstance(parts[0], ast.Constant) else ""
            if isinstance(first, str) and first.startswith("_") and not first.startswith("__"):
                yield first


def modules(tree):
    """The private modules of TensorFlow and Keras that are imported or spelled out."""
    for node in walked(tree):
        if isinstance(node, ast.ImportFrom):
            found = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found = [dotted(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            found = [node.value]
        else:
            continue
        yield from (name for name in found if name.startswith(MODULES))


def dotted(node):
    """An attribute as it is written, if it is one of names alone."""
    names = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return ".".join([node.id, *names]) if isinstance(node, ast.Name) else ""


def texts(tree):
    """The strings of a file that are private names, as tables of names hold them."""
    for node in walked(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE.fullmatch(node.value):
            yield node.value
