"""Recorded runs as one page to look at."""

from graphpasses.html_report.page import render_page

__all__ = ["render_page"]
