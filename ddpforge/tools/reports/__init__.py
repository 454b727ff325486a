"""Reports on runs: one HTML file that needs no network, made only from the folders of the runs."""

from ddpforge.tools.reports.contents import Report, gather
from ddpforge.tools.reports.page import render

__all__ = ["Report", "gather", "render"]
