"""`/data`: the page Data quality."""

from __future__ import annotations

from dashboards.data_quality.page import page

__all__ = ["page"]
