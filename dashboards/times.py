"""The time zone of a viewer's pages: UTC, or with `?tz=local` in the address that of the browser."""

from __future__ import annotations

from datetime import UTC, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import streamlit as st

from dashboards import words
from dashboards.routes import LOCAL_TIME, change_query, is_local_time


def switch_zone() -> None:
    """Changes between UTC and the browser's zone, in the address."""
    name, local = LOCAL_TIME
    change_query(**{name: "" if is_local_time() else local})


def apply_zone() -> None:
    """Sets the zone of all times in words for this run of a page."""
    words.set_zone(browser_zone() if is_local_time() else UTC)


def browser_zone() -> tzinfo:
    """Returns the browser's zone by name, else by its offset, else UTC."""
    name, minutes = st.context.timezone, st.context.timezone_offset
    try:
        return ZoneInfo(name) if isinstance(name, str) and name else _by_offset(minutes)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # a name that this machine's tables lack
        return _by_offset(minutes)


def _by_offset(minutes: object) -> tzinfo:
    """Returns a zone with the offset of JavaScript: minutes that UTC is ahead."""
    return timezone(-timedelta(minutes=minutes)) if isinstance(minutes, int) else UTC
