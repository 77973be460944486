"""Measurements of real processes for the benchmarks: memory and CPU (Linux), and the API of the pipeline."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

MIB = 1 << 20
WAIT_S = 20.0  # for an answer of the API; chosen: twice what a query may take


class Watched:
    """Samples of one process, by phase: (seconds of CPU, PSS, RSS) and the time of each."""

    def __init__(self, name: str, pid: int) -> None:
        self.name, self._home = name, Path(f"/proc/{pid}")
        self._samples: dict[str, list[tuple[float, float, int, int]]] = defaultdict(list)

    def sample(self, phase: str) -> None:
        sizes = {"Pss": 0, "Rss": 0}
        for line in (self._home / "smaps_rollup").read_text().splitlines():
            key, _, rest = line.partition(":")
            if key in sizes:
                sizes[key] = int(rest.split()[0]) << 10
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        fields = (self._home / "stat").read_text().rsplit(")", 1)[1].split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        self._samples[phase].append((uptime, seconds, sizes["Pss"], sizes["Rss"]))

    def figures(self, phase: str) -> tuple[float, float, float, float] | None:
        """Returns (PSS at the end, highest PSS, highest RSS in MiB, CPU in % of a core) of a phase with samples."""
        found = self._samples[phase]
        if not found:
            return None
        wall = found[-1][0] - found[0][0]
        share = (found[-1][1] - found[0][1]) / wall * 100 if wall else 0.0
        return found[-1][2] / MIB, max(s[2] for s in found) / MIB, max(s[3] for s in found) / MIB, share


class Api:
    """The pipeline's API on loopback."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def ready(self) -> tuple[int, str]:
        """Returns the status of /readyz and its reasons; 0 without an answer."""
        try:
            with urllib.request.urlopen(f"{self._base}/readyz", timeout=WAIT_S) as answer:
                return answer.status, ""
        except urllib.error.HTTPError as error:
            with error:
                return error.code, "; ".join(json.load(error).get("reasons", ()))
        except OSError:
            return 0, "no answer"

    def number(self, query: str, column: str = "") -> int:
        """Returns one number of the first row of a query's result, of its first column by default; 0 for NULL."""
        asked = urllib.request.Request(
            f"{self._base}/api/v1/sql", json.dumps({"query": query}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
            found: dict[str, Any] = json.load(answer)
        return int(found["rows"][0][found["columns"].index(column) if column else 0] or 0)

    def metric(self, name: str) -> float:
        """Returns one value of /metrics."""
        with urllib.request.urlopen(f"{self._base}/metrics", timeout=WAIT_S) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == name)
