"""Recorded runs as one page to look at."""

from graphpasses.html_report.page import ShownRun as ShownRun
from graphpasses.html_report.page import render_page as render_page
