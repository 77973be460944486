"""Roles of callers of the API. A separate module: the configuration needs it and must stay light."""

from __future__ import annotations

from typing import Literal

Role = Literal["viewer", "operator", "admin"]
ROLES: tuple[Role, ...] = ("viewer", "operator", "admin")
"""Each includes those before it."""
