"""One HTML file about one or more runs: it needs no other file and no network."""

from loops.views.report.write import write_report as write_report
