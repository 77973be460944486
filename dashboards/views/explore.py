"""`/explore`: any signals of any devices over one time axis, and SQL over the store."""

from dashboards.explore.page import page

__all__ = ["page"]
