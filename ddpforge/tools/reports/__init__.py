"""Reports on runs: one HTML file that needs no network, made only from the folders of the runs."""

from ddpforge.tools.reports.page import render
from ddpforge.tools.reports.report import RunReport, gather

__all__ = ["RunReport", "gather", "render"]
