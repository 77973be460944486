"""`fleetpulse objectives` and `rma`: error budgets, lost GPU-hours, energy, failure rates, nodes and spares."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import UsageError
from pipeline.runtime.private_files import open_private

Rows = list[Mapping[str, Any]]
LISTS: Mapping[str, tuple[str, ...]] = {
    "list": ("name", "scope", "kind", "target", "days", "achieved", "left_share", "left_hours", "lost_hours", "alert"),
    "losses": ("cause", "gpu_hours", "share", "incidents", "kwh", "cost", "currency", "kg_co2e"),
    "energy": ("job", "name", "account", "gpu_hours", "kwh", "lost_kwh", "cost", "currency", "kg_co2e"),
    "failures": ("type", "cause", "failures", "node_days", "mttf_days", "mttf_low_days", "mttf_high_days"),
    "nodes": ("node", "type", "failures", "expected", "frailty", "p_lemon", "burn_in_until", "suggestion", "last"),
    "spares": ("part", "failures", "expected", "spares_poisson", "spares"),
}
"""View -> the columns for people."""


def run_objectives(config: Config, given: argparse.Namespace) -> tuple[Rows, Sequence[str]]:
    """Returns the rows of a list and the columns for people."""
    shown = given.verb or "list"
    path = f"/api/v1/objectives?{urlencode({'days': given.days})}"
    status, answer = client.get(config, path)
    if status != 200:
        raise client.make_error(status, answer, f"{client.base_url(config)}{path}")
    if given.output == "table" and not answer["evaluated"]["complete"]:
        sys.stderr.write(f"fleetpulse: {answer['evaluated']['note']}\n")
    rows: Mapping[str, Rows] = {
        "list": answer["objectives"],
        "losses": answer["lost"]["by_cause"],
        "energy": answer["energy"]["by_job"],
        "failures": answer["failures"] + [_published(row) for row in answer["published"]],
        "nodes": answer["ranking"],
        "spares": answer["spares"]["parts"],
    }
    return rows[shown], LISTS[shown]


def write_rma(config: Config, given: argparse.Namespace) -> str:
    """Writes the RMA packet; returns a line about the file. An existing file stays. Raises UsageError."""
    query = urlencode({"subject": given.subject, "hours": given.hours})
    body, name = client.download(config, f"/api/v1/rma?{query}")
    if given.zip == "-":
        sys.stdout.buffer.write(body)
        return f"wrote {len(body):,} bytes"
    path = Path(given.zip or name or "rma.zip")
    try:
        with open(path, "xb", opener=open_private) as file:
            file.write(body)
    except FileExistsError as error:
        raise UsageError(f"{path}: exists; name another file with --zip FILE") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error
    return f"wrote {path}, {len(body):,} bytes; read summary.html in it before you send it"


def _published(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rate of a published fleet as a row beside one's own: days to failure of a node of 8 GPUs."""
    days = round(1e6 / row["per_million_gpu_hours"] / 8 / 24, 1)
    return {"type": row["fleet"], "cause": row["cause"], "mttf_days": days, **row}
