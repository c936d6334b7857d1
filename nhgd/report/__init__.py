"""Reports: a folder of results as one page that needs no network."""

from nhgd.report.report import report

__all__ = ["report"]
