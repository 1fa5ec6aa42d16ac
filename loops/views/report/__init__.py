"""One HTML file about one run or several: it needs nothing beside it, and opens without a network."""

from loops.views.report.write import write_report as write_report
