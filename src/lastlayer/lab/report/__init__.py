"""The report of a comparison: a page that works offline, pictures, and tables."""

from lastlayer.lab.report.build import write_report

__all__ = ["write_report"]
