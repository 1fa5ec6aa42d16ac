"""One HTML file about one run or several: it needs nothing beside it, and opens without a network."""

from loops.report.write import write_report as write_report
