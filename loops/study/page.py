"""The page of a study's report: its style, its frame, and the sample of a set-up's mark."""

from __future__ import annotations

from loops.support.marks import Mark

_BLACK = "#000000"
# Of markers as matplotlib names them: a path around (0, 0), about 8 wide.
_SHAPES = {
    "o": "M-4,0 a4,4 0 1,0 8,0 a4,4 0 1,0 -8,0",
    "s": "M-3.5,-3.5 h7 v7 h-7 z",
    "^": "M-4.2,3.5 h8.4 l-4.2,-7.5 z",
    "v": "M-4.2,-3.5 h8.4 l-4.2,7.5 z",
    "D": "M0,-4.6 l4.6,4.6 l-4.6,4.6 l-4.6,-4.6 z",
    "X": "M-4,-4 h2.6 l1.4,1.6 l1.4,-1.6 h2.6 l-2.4,4 l2.4,4 h-2.6 l-1.4,-1.6 l-1.4,1.6 h-2.6 l2.4,-4 z",
    "P": "M-1.4,-4.2 h2.8 v2.8 h2.8 v2.8 h-2.8 v2.8 h-2.8 v-2.8 h-2.8 v-2.8 h2.8 z",
}


def sample(mark: Mark) -> str:
    """A set-up's line and marker as in the figures, as SVG. Black is the colour of the page's text: it may be dark."""
    tint = "currentColor" if mark.colour == _BLACK else mark.colour
    dashes = " ".join(f"{1.5 * length:g}" for length in mark.dashes)
    line = f'<path d="M-16,0 h32" stroke="{tint}" stroke-width="2" stroke-dasharray="{dashes or "none"}"/>'
    shape = f'<path d="{_SHAPES[mark.marker]}" fill="{tint}"/>'
    return f'<svg class="mark" viewBox="-16 -6 32 12" aria-hidden="true">{line}{shape}</svg>'


STYLE = """
:root { color-scheme: light dark; --text: #1d1f21; --soft: #5c6166; --line: #d9dcdf; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e6e8; --soft: #a3a9af; --line: #3b4045; --page: #17191b; } }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 900px; color: var(--text); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
.result { font-size: 1.15rem; margin: 0 0 1.5rem; }
.wide { overflow-x: auto; } .card { background: #fff; border-radius: 6px; } figure { margin: 0; }
img { display: block; width: 100%; min-width: 620px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; line-height: 1.3; }
th, td { padding: .45rem 0 .45rem .8rem; border-bottom: 1px solid var(--line); text-align: right; }
th, td { vertical-align: baseline; }
th:first-child { width: 36%; padding-left: 2.9em; text-indent: -2.9em; text-align: left; overflow-wrap: anywhere; }
th[scope=row] { font-weight: 400; } sub, sup { line-height: 0; } li { overflow-wrap: anywhere; }
small { display: block; color: var(--soft); }
.mark { width: 2.4em; height: .9em; margin-right: .5em; vertical-align: -.08em; }
@media (max-width: 900px) { table { font-size: .85rem; } th, td { padding-left: .5rem; } }
@media (max-width: 600px) {
  table { font-size: 1rem; }
  table, tbody, tr, th[scope=row], td { display: block; } th[scope=col] { display: none; }
  tr { padding: .6rem 0; border-bottom: 1px solid var(--line); } tr:first-child { padding: 0; }
  th:first-child { width: auto; font-weight: 600; } th, td { padding: .1rem 0; border: 0; text-align: left; }
  td { display: flex; justify-content: space-between; gap: 1rem; } td small { display: inline; }
  td::before { content: attr(data-head); color: var(--soft); margin-right: auto; }
}
.note, figcaption { color: var(--soft); font-size: .95rem; } .note, figcaption p { margin: .7rem 0 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.2rem; }
dt { color: var(--soft); } dd { margin: 0; }
pre { padding: .8rem 1rem; border: 1px solid var(--line); border-radius: 6px; white-space: pre-wrap; }
"""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
