"""The Python blocks of a Markdown file as one program."""

import re
import runpy


def python_blocks(text):
    """The blocks marked as Python, in order."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def text_blocks(text):
    """The blocks marked as text, which show what the program prints, in order."""
    return re.findall(r"^```text\n(.*?)```", text, flags=re.MULTILINE | re.DOTALL)


def run_blocks(text, folder, run_name=None):
    """Runs them, in order, as one program in `folder`, and returns its names."""
    program = folder / "blocks.py"
    program.write_text("\n".join(python_blocks(text)), encoding="utf-8")
    return runpy.run_path(str(program), run_name=run_name)
