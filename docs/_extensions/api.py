"""The directive `api`: a table of public names, then each with its docstring."""

import ast
import enum
import importlib
import inspect
import sys

from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective


class Api(SphinxDirective):
    """Names of a module, one a line: what each is in one sentence, then everything that its docstring says."""

    required_arguments = 1
    has_content = True

    def run(self):
        place = self.arguments[0]
        module = importlib.import_module(place)
        names = [name.strip() for name in self.content if name.strip()]
        table = [name for name in names if kind_of(getattr(module, name)) != "data"]
        lines = [f".. currentmodule:: {place}", ""]
        if table:
            lines += [".. autosummary::", "   :nosignatures:", "", *(f"   {name}" for name in table), ""]
        for name in names:
            lines += described(place, name, getattr(module, name))
        return self.parse_text_to_nodes("\n".join(["````{eval-rst}", *lines, "````"]))


def kind_of(thing) -> str:
    if inspect.isclass(thing):
        return "exception" if issubclass(thing, BaseException) else "class"
    return "function" if callable(thing) else "data"


def described(place, name, thing):
    """The lines of reStructuredText that document a name."""
    kind = kind_of(thing)
    if kind == "data":
        return [
            f".. py:data:: {name}",
            f"   :value: {thing!r}",
            "",
            *(f"   {line}" for line in said_of(place, name)),
            "",
        ]
    undocumented = ["   :undoc-members:"] if inspect.isclass(thing) and issubclass(thing, enum.Enum) else []
    return [f".. auto{kind}:: {name}", *([] if kind == "function" else ["   :members:"]), *undocumented, ""]


def said_of(place, name):
    """The docstring under a constant, in the file that defines it."""
    for other in [module for module in sys.modules if module.startswith(place)]:
        docs = ModuleAnalyzer.for_module(other).find_attr_docs()
        if ("", name) in docs:
            return docs["", name]
    return []


def mark_code(app, kind, name, thing, options, lines):
    """Turns an indented block of a docstring into code."""
    found = []
    for number, line in enumerate(lines):
        opens = line.startswith("    ") and number > 0 and not lines[number - 1].strip()
        last = next((other for other in reversed(lines[:number]) if other.strip()), "")
        if opens and last and not last.startswith((" ", "- ")):
            rest = lines[number:]
            ends = (at for at, other in enumerate(rest) if other.strip() and not other.startswith("    "))
            code = "\n".join(other[4:] for other in rest[: next(ends, len(rest))])
            found += [f".. code-block:: {'python' if is_python(code) else 'text'}", ""]
        found.append(line)
    lines[:] = found


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def skip_fields(app, kind, name, thing, skip, options):
    """Leaves out the fields of a NamedTuple, which its docstring names under Attributes."""
    return True if str(getattr(thing, "__doc__", "")).startswith("Alias for field number") else None


def setup(app):
    app.setup_extension("sphinx.ext.autodoc")
    app.add_directive("api", Api)
    # Before napoleon, which rewrites the sections.
    app.connect("autodoc-process-docstring", mark_code, priority=400)
    app.connect("autodoc-skip-member", skip_fields)
    return {"parallel_read_safe": True}
