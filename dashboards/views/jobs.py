"""`/jobs`: the page Jobs."""

from __future__ import annotations

from dashboards.jobs.page import page

__all__ = ["page"]
