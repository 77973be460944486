"""`fleetpulse mutes`: lists, adds and ends mutes through the running pipeline."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.records import from_iso

COLUMNS = ("id", "detector", "scope", "since", "until", "ended", "ended_by", "user", "reason")
_PATH = "/api/v1/mutes"


def run_mutes(config: Config, given: argparse.Namespace) -> list[Mapping[str, Any]]:
    """Returns mutes in the form of the API: the active ones (or all), or the one that was added or ended."""
    if given.verb == "add":
        return [client.post(config, _PATH, _new_mute(given))]
    if given.verb == "end":
        return [client.post(config, f"{_PATH}/{quote(given.id, safe='')}/end", {})]
    status, answer = client.get(config, _PATH)
    if status != 200:
        raise client.make_error(status, answer, client.base_url(config) + _PATH)
    now = time.time_ns() // 1000
    return [mute for mute in answer["mutes"] if given.all or is_active(mute, now)]


def is_active(mute: Mapping[str, Any], now: int) -> bool:
    """Returns whether a mute is in force at `now` (UTC us)."""
    return mute["ended"] is None and from_iso(mute["until"]) > now


def _new_mute(given: argparse.Namespace) -> dict[str, Any]:
    return {"detector": given.detector, "scope": given.scope, "seconds": given.hours * 3600, "reason": given.reason}
