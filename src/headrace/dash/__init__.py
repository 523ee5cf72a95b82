"""What a run looked like: one page with everything on it.

series   metrics.jsonl as columns, spikes kept
panels   which curves belong together, what is healthy, what stands out
page     one self-contained HTML file with interactive curves
picture  the same panels as a PNG, for documents
"""

from headrace.dash.page import write_page
from headrace.dash.panels import Finding, Panel, Report, read_report
from headrace.dash.picture import write_picture
from headrace.dash.series import Series, read_series

__all__ = ["Finding", "Panel", "Report", "Series", "read_report", "read_series", "write_page", "write_picture"]
