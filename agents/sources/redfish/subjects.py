"""What a BMC can be read for: the words of `read` in its configuration."""

from __future__ import annotations

DEFAULT = ("coolant", "leaks", "power", "environment")
"""coolant: connectors, pumps, reservoirs, filters, loops. leaks: leak detectors. power: supplies, shelves, PDUs,
batteries. environment: what chassis and coolant units draw, and the air around them."""
SUBJECTS = (*DEFAULT, "sensors")
"""sensors: all Sensors of the chassis besides, some hundred requests in 30 s where a BMC does not expand them."""
