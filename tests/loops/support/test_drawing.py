"""Guards what is said of a figure that cannot be drawn or written."""

import sys

import pytest
from matplotlib.figure import Figure

import halfstep as cli
import loops
from loops.support.drawing import save

MISSING = 'halfstep: the figures need matplotlib: pip install "halfstep[study]"\n'


@pytest.mark.parametrize("asked", [["lab", "study"], ["doctor", "--model", "x:y", "--out", "a.png"]])
def test_without_matplotlib_a_command_says_so_before_it_runs(capsys, monkeypatch, tmp_path, asked):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(tmp_path)
    assert cli.main(asked) == 1
    assert capsys.readouterr() == ("", MISSING)


@pytest.mark.parametrize("name", ["no/such.png", "figure.docx"])
def test_a_figure_that_cannot_be_written_is_one_sentence(tmp_path, name):
    with pytest.raises(loops.NotWritable, match=r"the figure cannot be written .*Name a \.png, \.svg or \.pdf\."):
        save(Figure(), tmp_path / name)
