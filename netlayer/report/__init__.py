"""Self-contained HTML reports: `Report` is the page, `charts` draws what goes on it. Imported by who writes one."""

from netlayer.report import charts
from netlayer.report.axes import Axis
from netlayer.report.marks import Chart, Threshold
from netlayer.report.page import Report
from netlayer.report.section import Figure, Section
from netlayer.verdict import Verdict

__all__ = ["Axis", "Chart", "Figure", "Report", "Section", "Threshold", "Verdict", "charts"]
