"""`/facility`: the page Facility."""

from __future__ import annotations

from dashboards.facility.page import page

__all__ = ["page"]
