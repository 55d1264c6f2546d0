"""Recorded runs as one page to look at."""

from graphpasses.html_report.page import ShownRun, render_page

__all__ = ["ShownRun", "render_page"]
