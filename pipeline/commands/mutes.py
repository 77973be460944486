"""`fleetpulse mutes`: what is muted, by whom, why and until when; asked of the running pipeline."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import UsageError
from pipeline.model.records import from_iso

COLUMNS = ("id", "detector", "scope", "since", "until", "ended", "ended_by", "user", "reason")
_PATH = "/api/v1/mutes"


def rows(config: Config, given: argparse.Namespace) -> list[Mapping[str, Any]]:
    """Mutes as the API has them: those that stand, or the one that was made or ended just now."""
    if given.verb == "add":
        return [client.post(config, _PATH, _wanted(given))]
    if given.verb == "end":
        return [client.post(config, f"{_PATH}/{quote(given.id, safe='')}/end", {})]
    status, answer = client.get(config, _PATH)
    if status != 200:
        raise client.error_of(status, answer, client.base_url(config) + _PATH)
    now = time.time_ns() // 1000
    return [mute for mute in answer["mutes"] if given.all or stands(mute, now)]


def stands(mute: Mapping[str, Any], now: int) -> bool:
    """Whether it silences anything now (us)."""
    return mute["ended"] is None and from_iso(mute["until"]) > now


def _wanted(given: argparse.Namespace) -> dict[str, Any]:
    if not 0 < given.hours < float("inf"):
        raise UsageError(f"mutes add: --hours {given.hours:g}: wanted more than 0")
    return {"detector": given.detector, "scope": given.scope, "seconds": given.hours * 3600, "reason": given.reason}
