"""What each chart of a run shows. `report` draws it as SVG that a page stretches, `plots` as a figure of matplotlib."""
