"""The commands of the dashboard: `fleetpulse dashboard` and `fleetpulse report`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import Retryable, UsageError
from pipeline.runtime.reload import Load

TIMEOUT_S = 30.0
"""Limit of one request (s). Chosen: a fleet of 100,000 nodes on a busy pipeline."""


def run(config: Config, given: argparse.Namespace, load_again: Load | None = None) -> int:
    """Runs the command and returns its exit code. load_again: reads the configuration after SIGHUP."""
    if given.command == "report":
        return write_reports(config, given)
    from dashboards import serve

    return serve.run(config, load_again)


def read_api(config: Config, path: str, query: Mapping[str, str]) -> Mapping[str, Any]:
    """Returns the answer of `GET /api/v1/{path}`. Raises Unreachable, or the error that the API reports."""
    address = f"/api/v1/{path}" + (f"?{urlencode(query)}" if query else "")
    status, answer = client.get(config, address, TIMEOUT_S)
    if status != 200:
        raise client.make_error(status, answer, client.base_url(config) + address)
    found: Mapping[str, Any] = answer
    return found


def write_reports(config: Config, given: argparse.Namespace) -> int:
    """Writes the report, the picture, or both. Raises UsageError without a file to write."""
    from streamlit import logger

    logger.set_log_level("ERROR")  # it warns that no server runs when the report's modules are imported
    from dashboards.report.document import map_picture, read_map, write_report

    if given.weekly:
        return write_weekly(config, given)
    if given.json:
        raise UsageError("report: --json is of --weekly; expected --weekly --json FILE")
    if not given.html and not given.png:
        raise UsageError("report: nothing to write; expected --html FILE or --png FILE")

    def read(path: str, query: Mapping[str, str]) -> Mapping[str, Any]:
        return read_api(config, path, query)

    if given.html:
        _write(given.html, write_report(read, time.time_ns() // 1000, given.within or "").encode())
    if given.png:
        query = {"by": given.by, "colour": given.colour, **({"within": given.within} if given.within else {})}
        parts = read_map(read, query)
        if not parts.fits:
            raise Retryable("report: the topology changes faster than it can be read; try again")
        _write(given.png, map_picture(parts))
    return 0


def write_weekly(config: Config, given: argparse.Namespace) -> int:
    """Writes the report of the last days as HTML, JSON, or both. Raises UsageError without a file to write."""
    from dashboards.report.weekly import write_html

    if not given.html and not given.json:
        raise UsageError("report: nothing to write; expected --html FILE or --json FILE")
    found = read_api(config, "objectives", {"days": f"{given.days:g}"})
    if not found["evaluated"]["complete"]:
        sys.stderr.write(f"fleetpulse: {found['evaluated']['note']}\n")
    if given.html:
        _write(given.html, write_html(found, time.time_ns() // 1000).encode())
    if given.json:
        _write(given.json, (json.dumps(found, indent=2, ensure_ascii=False) + "\n").encode())
    return 0


def _write(name: str, content: bytes) -> None:
    if name == "-":
        sys.stdout.buffer.write(content)
        return
    try:
        Path(name).write_bytes(content)
    except OSError as error:
        raise UsageError(f"{name}: cannot be written: {error.strerror}") from error
    sys.stderr.write(f"fleetpulse: wrote {name}, {len(content):,} bytes\n")
