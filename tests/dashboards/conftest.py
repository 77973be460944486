"""A real HTTP server with the responses of the API, which can be made to fail."""

from __future__ import annotations

import base64
import functools
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from streamlit.components.v2 import manifest_scanner

from dashboards import identity
from dashboards.client import API_TOKEN_FILE, API_URL
from dashboards.identity import Person
from pipeline.model.records import SECOND, iso
from tests.parts import do_without

NOW = 1_767_268_800 * SECOND  # 2026-01-01T12:00:00Z


@pytest.fixture(autouse=True)
def _restore_main_module() -> Iterator[None]:
    """Restores `__main__`, which a page under test replaces; processes of later tests would run that page."""
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main


@pytest.fixture(scope="session", autouse=True)
def _scan_once() -> Iterator[None]:
    """Streamlit's AppTest looks for components among all installed packages before each new page; here only once."""
    scan = functools.cache(manifest_scanner.scan_component_manifests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", scan)
        yield


def incident_table(identity: str, **changes: Any) -> dict[str, Any]:
    """Returns an incident as in the API."""
    return {
        "id": identity,
        "cause": "rank:81.17",
        "opened": iso(NOW - 600 * SECOND),
        "onset": iso(NOW - 900 * SECOND),
        "resolved": None,
        "severity": "page",
        "members": ["rank:81.17", "gpu:n003.1"],
        "confidence": 0.88,
        "state": "open",
        "summary": "rank:81.17 computes 0.61 s a step, 1.42 times its stage's 0.43 s",
        "simulated": True,
        "detector": "straggler",
        "entity": "rank:81.17",
        **changes,
    }


def finding_table(**changes: Any) -> dict[str, Any]:
    """Returns a finding as in the API."""
    return {
        "time": iso(NOW - 600 * SECOND),
        "onset": iso(NOW - 900 * SECOND),
        "entity": "rank:81.17",
        "detector": "straggler",
        "level": "page",
        "score": 6.5,
        "summary": "rank:81.17 computes 0.61 s a step",
        "evidence": {"slowdown": 1.42, "value": 0.61, "expected": 0.43, "peers": 511},
        "signals": ["rank.compute_time"],
        **changes,
    }


def series_table(entity: str, signal: str, points: int = 60) -> dict[str, Any]:
    """Returns a series as in the API; the value leaves the band after two thirds."""
    return {
        "entity": entity,
        "signal": {"name": signal, "unit": "s", "help": "Computation of the last step", "kind": "gauge"},
        "peer_kind": "stage",
        "peers": 7,
        "points": [
            {
                "time": iso(NOW - (points - i) * 60 * SECOND),
                "value": 0.43 if i < points * 2 // 3 else 0.61,
                "median": 0.43,
                "low": 0.42,
                "high": 0.44,
            }
            for i in range(points)
        ],
    }


def mute_table(identity: str, **changes: Any) -> dict[str, Any]:
    """Returns a mute as in the API."""
    return {
        "id": identity,
        "detector": "straggler",
        "scope": "rack:r1",
        "since": iso(NOW - 3600 * SECOND),
        "until": "2999-01-01T00:00:00.000000Z",
        "ended": None,
        "reason": "new paste",
        "user": "ann",
        "ended_by": None,
        **changes,
    }


def silence_table(identity: str, kind: str = "silence", **changes: Any) -> dict[str, Any]:
    """Returns a silence as in the API."""
    return {
        "id": identity,
        "kind": kind,
        "state": "active",
        "matchers": [{"name": "rack", "value": "r1", "isRegex": False, "isEqual": True}],
        "text": 'rack="r1"',
        "starts": iso(NOW - 3600 * SECOND),
        "ends": "2999-01-01T00:00:00.000000Z",
        "until": "2999-01-01T00:00:00.000000Z",
        "author": "ann",
        "reason": "new paste",
        "created": iso(NOW - 3600 * SECOND),
        "updated": iso(NOW - 3600 * SECOND),
        "updated_by": "ann",
        "version": 1,
        "expired": None,
        "expired_by": None,
        "source": "api",
        **changes,
    }


def detector_table(**changes: Any) -> dict[str, Any]:
    """Returns a detector as in the API."""
    return {
        "name": "straggler",
        "family": "straggler",
        "class": "rank",
        "needs": ["rank.compute_time"],
        "wants": ["gpu.sm_clock"],
        "blind": "A stage that is slow as a whole.",
        "about": "A rank computes longer than its stage.",
        "settings": {"hold": 120.0},
        "budget": ["streams: threshold 18.5 at 10 s: at most 0.5 suspects per 1,000 node-days"],
        "modes": [],
        "off": [],
        "errors": 0,
        **changes,
    }


def map_tables(fleet: dict[str, Any], by: str, colour: str, within: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (map, layout) of a fleet as in the API: by rack, all others in one group. Levels are the node's place."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for node in fleet["nodes"]:
        group = (node["rack"] or "") if by == "rack" else f"{by}:1"
        if not within or group == within:
            groups.setdefault(group, []).append(node)
    ordered = dict(sorted(groups.items(), key=lambda item: item[0] == ""))
    nodes = [node for group in ordered.values() for node in group]
    sets = list(dict.fromkeys(tuple(n["incidents"]) for n in nodes if n["incidents"]))
    states = ["ok", "watch", "degraded", "critical", "no_data"]
    looks = [states.index(n["state"]) | 8 * bool(n.get("affected")) | 16 * n["simulated"] for n in nodes]
    counts = {s: sum(n["state"] == s and not n.get("affected") for n in nodes) for s in states}
    scale = {"label": "measured", "unit": "W", "low": 0.0, "high": 100.0, "diverging": False, "logarithmic": False}
    head = {k: v for k, v in fleet.items() if k not in ("nodes", "counts")}
    mark = str(hash((by, within, tuple(n["entity"] for n in nodes), tuple(ordered))))
    values = {
        "by": by,
        "colour": colour,
        "within": within or None,
        "layout": mark,
        "nodes": len(nodes),
        "fleet": len(fleet["nodes"]),
        "simulated": sum(n["simulated"] for n in nodes),
        "counts": counts | {"affected": sum(bool(n.get("affected")) for n in nodes)},
        "causes": fleet.get("causes", []),
        "looks": base64.b64encode(bytes(looks)).decode(),
        "ages": base64.b64encode(bytes(74 if n["state"] == "no_data" else 0 for n in nodes)).decode(),
        "levels": None if colour == "state" else base64.b64encode(bytes(i % 251 for i in range(len(nodes)))).decode(),
        "scale": None if colour == "state" else scale,
        "missing": 0,
        "incident_sets": [list(ids) for ids in sets],
        "incident_of": base64.b64encode(
            bytes(1 + sets.index(tuple(n["incidents"])) if n["incidents"] else 0 for n in nodes)
        ).decode(),
    }
    names = {"groups": [[g, len(ns)] for g, ns in ordered.items()], "names": [n["entity"] for n in nodes]}
    head = {k: v for k, v in head.items() if k != "causes"}
    return head | values, {"layout": mark, "by": by, "within": within or None, **names}


def shared_table(value: str, inside: int, outside: int, p: float, attribute: str = "leaf") -> dict[str, Any]:
    """Returns a value that selected nodes share, as in the API."""
    counts = {"inside": inside, "outside": outside, "p": p / 10, "p_corrected": p}
    return {"attribute": attribute, "value": value, **counts, "separates": p < 0.01}


class Api:
    """State of the server. `broken` maps a path to (status, bytes); while `released` is clear, responses wait."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, dict[str, list[str]]]] = []
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.posted_headers: list[dict[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.broken: dict[str, tuple[int, bytes]] = {}
        self.released = threading.Event()
        self.released.set()
        self.fleet: dict[str, Any] = {
            "as_of": iso(NOW),
            "watermark": iso(NOW - 40 * SECOND),
            "backlog": False,
            "lag_s": 40.0,
            "newest": iso(NOW - 3 * SECOND),
            "unready": [],
            "stalled": False,
            "counts": {"ok": 1, "watch": 0, "degraded": 0, "critical": 1, "no_data": 1},
            "nodes": [
                self.node("n003", "critical", incidents=["A1"]),
                self.node("n004", "no_data"),
                {**self.node("host", "ok"), "simulated": False, "rack": None},
            ],
            "sources": {"agents": 3, "silent": 1, "gaps": 2, "dead_letters": 0},
        }
        self.sql = (400, b'{"detail": "no query is expected"}')
        self.tables: dict[str, Callable[[dict[str, list[str]]], Any]] = {}  # path -> query -> table
        self.share: dict[str, Any] = {
            "as_of": iso(NOW),
            "selected": 2,
            "others": 1,
            "compared": 7,
            "threshold": 0.01,
            "statistic": "hypergeometric tail, Bonferroni",
            "unknown": [],
            "shared": [shared_table("leaf:l7", 2, 0, 0.0004)],
        }
        self.mutes: list[dict[str, Any]] = []
        self.silences: list[dict[str, Any]] = []
        self.audit: list[dict[str, Any]] = []
        self.changed: list[dict[str, Any]] = []
        hit = {"kind": "incident", "id": "A1", "match": "A1", "text": "rank 17 is slow", "state": "open"}
        node = {"kind": "node", "id": "node:n003", "match": "node:n003", "text": "rack:r1", "state": None}
        self.hits: list[dict[str, Any]] = [node, hit]
        self.answers: dict[str, Any] = {}  # path -> table, for pages that bring their own
        self.panel: dict[str, Any] = {"detectors": [detector_table()], "modes": []}
        self.incidents = {
            "A1": {**incident_table("A1"), "findings": [finding_table()], "history": [], "notifications": []},
            "B2": {**incident_table("B2", severity="ticket", state="resolved", resolved=iso(NOW))},
        }

    def node(self, name: str, state: str, incidents: list[str] | None = None) -> dict[str, Any]:
        """Returns a node as in the API."""
        seen = iso(NOW - (900 if state == "no_data" else 3) * SECOND)
        own = {"entity": f"node:{name}", "rack": "rack:r1", "state": state, "last_seen": seen, "simulated": True}
        return {**own, "incidents": incidents or []}

    def get(self, path: str, query: dict[str, list[str]]) -> tuple[int, bytes]:
        """Returns (status, body) of a GET."""
        self.asked.append((path, query))
        if path in self.broken:
            return self.broken[path]
        if path in self.answers:
            return 200, json.dumps(self.answers[path]).encode()
        if path in self.tables and (table := self.tables[path](query)) is not None:
            return 200, json.dumps(table).encode()
        if path == "fleet":
            simulated = sum(node["simulated"] for node in self.fleet["nodes"])
            return 200, json.dumps({"simulated": simulated, **self.fleet}).encode()
        if path in ("fleet/map", "fleet/layout"):
            one = {name: query.get(name, [""])[0] for name in ("by", "colour", "within")}
            tables = map_tables(self.fleet, one["by"] or "rack", one["colour"] or "state", one["within"])
            return 200, json.dumps(tables[path == "fleet/layout"]).encode()
        if path == "incidents":
            return 200, json.dumps(self.list_incidents(query)).encode()
        if path == "silences":
            return 200, json.dumps({"silences": self.silences}).encode()
        if path == "audit":
            return 200, json.dumps({"audit": self.audit, "broken": None}).encode()
        if path == "handover":
            return 200, json.dumps(self.hand_over(query)).encode()
        if path == "search":
            return 200, json.dumps({"results": self.hits, "total": len(self.hits)}).encode()
        if path == "mutes":
            return 200, json.dumps({"mutes": self.mutes}).encode()
        if path == "detectors":
            return 200, json.dumps(self.panel).encode()
        if path.startswith("incidents/") and path[10:] in self.incidents:
            return 200, json.dumps(self.incidents[path[10:]]).encode()
        if path == "series" and query["signal"][0].startswith("rank."):
            return 200, json.dumps(series_table(query["entity"][0], query["signal"][0])).encode()
        if path == "timeline":
            item = {"time": iso(NOW), "kind": "event", "entity": "job:81", "text": "checkpoint: step 7"}
            return 200, json.dumps({"items": [item]}).encode()
        return 404, json.dumps({"title": "Not Found", "status": 404, "detail": f"no {path} here"}).encode()

    def list_incidents(self, query: dict[str, list[str]]) -> dict[str, Any]:
        """Returns a page of incidents; of the filters only `show` and `limit` count here."""
        everything = list(self.incidents.values())
        unresolved = [i for i in everything if i["state"] != "resolved"]
        shown = {"unresolved": unresolved, "pending": [i for i in unresolved if i["state"] == "open"]}
        shown |= {"resolved": [i for i in everything if i["state"] == "resolved"], "all": everything}
        shown |= {"acknowledged": [i for i in unresolved if i["state"] == "acknowledged"]}
        shown |= {"silenced": [i for i in unresolved if i["state"] == "silenced"]}
        found = shown[query.get("show", ["all"])[0]]
        limit, offset = int(query.get("limit", ["1000"])[0]), int(query.get("offset", ["0"])[0])
        counts = {name: len(rows) for name, rows in shown.items()}
        page = {"incidents": found[offset : offset + limit], "total": len(found), "counts": counts, "groups": []}
        return {**page, "judged": iso(NOW), "stalled": False, "unready": []}

    def hand_over(self, query: dict[str, list[str]]) -> dict[str, Any]:
        """Returns a handover."""
        unresolved = [i for i in self.incidents.values() if i["state"] != "resolved"]
        late = {"time": iso(NOW), "id": "A1", "what": "page without an owner", "about": "rank:81.17 is slow"}
        return {
            "since": query.get("since", [iso(NOW - 8 * 3600 * SECOND)])[0],
            "now": iso(NOW),
            "open": unresolved,
            "muted": {"incidents": [], "silences": self.silences},
            "pending": [late],
            "changed": self.changed,
        }

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Returns (status, body) of a POST."""
        if path in self.broken:
            return self.broken[path]
        self.posted.append((path, body))
        if path == "share":
            return 200, json.dumps(self.share).encode()
        if path == "sql":
            return self.sql
        if path.startswith("acts"):
            return 200, json.dumps(self.answers["acts/ACT-1"]).encode()
        if path.startswith("mutes"):
            return self._handle_mute(path, body)
        if path.startswith(("silences", "maintenance")):
            return self._handle_silence(path, body)
        if path == "notifications/replay":
            found = next(r for r in self.answers["receivers"]["receivers"] if r["name"] == body["receiver"])
            sent, found["dead"] = found["dead"], 0
            return 200, json.dumps({"notifications": [], "replayed": sent}).encode()
        if path == "audit/reloads":
            return 200, json.dumps(body).encode()
        _, identity, act = path.split("/")
        found = self.incidents[identity]
        state = {"acknowledge": "acknowledged", "resolve": "resolved", "reopen": "open"}.get(act)
        if state:
            found["state"] = state
        if act == "assign":
            found["assignee"] = body["to"] or None
        return 200, json.dumps(found).encode()

    def _handle_silence(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "silences/preview":
            if any("=" not in matcher for matcher in body["matchers"]):
                return 400, b'{"detail": "matcher: expected LABEL=VALUE"}'
            unresolved = [i for i in self.incidents.values() if i["state"] != "resolved"]
            return 200, json.dumps({"incidents": unresolved}).encode()
        kind, _, rest = path.partition("/")
        if not rest:
            made = silence_table(f"s{len(self.silences)}", kind.removesuffix("s"), reason=body["reason"])
            made["text"] = " ".join(body.get("matchers") or [f"scope={json.dumps(s)}" for s in body.get("scopes", [])])
            self.silences.append(made)
            return 200, json.dumps(made).encode()
        found = next(s for s in self.silences if s["id"] == rest.split("/")[0])
        found |= {"state": "expired"} if rest.endswith("/expire") else {k: body[k] for k in ("ends", "reason")}
        found["version"] += 1
        return 200, json.dumps(found).encode()

    def _handle_mute(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "mutes":
            self.mutes.append(mute_table(f"m{len(self.mutes)}", **{k: v for k, v in body.items() if k != "seconds"}))
            return 200, json.dumps(self.mutes[-1]).encode()
        found = next(m for m in self.mutes if m["id"] == path.split("/")[1])
        found["ended"] = iso(NOW)
        return 200, json.dumps(found).encode()


OPERATOR = Person("ann@example.org", "operator")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """A running API; the environment of the dashboard points to it, and an operator is logged in."""
    with running_api() as state:
        monkeypatch.setattr(identity, "current", lambda: OPERATOR)
        monkeypatch.setenv(API_URL, state.url)
        monkeypatch.delenv(API_TOKEN_FILE, raising=False)
        yield state


@contextmanager
def running_api() -> Iterator[Api]:
    """A server of the API on a free port of loopback, until the block ends."""
    state = Api()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def answer(self, found: tuple[int, bytes]) -> None:
            state.released.wait(20)
            self.send_response(found[0])
            if found[0] in (301, 302):
                self.send_header("Location", found[1].decode())
            self.send_header("Content-Length", str(len(found[1])))
            self.end_headers()
            self.wfile.write(found[1])

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            state.headers.append(dict(self.headers))
            self.answer(state.get(unquote(parts.path).removeprefix("/api/v1/"), parse_qs(parts.query)))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.posted_headers.append(dict(self.headers))
            path = unquote(self.path).removeprefix("/api/v1/")
            known = state.incidents.get(path.split("/")[1], {}) if "/" in path else {}
            if self.headers.get("If-Match") not in (None, f'"{known.get("version")}"') and known:
                self.answer((412, b'{"detail": "it was changed; read it again"}'))
            else:
                self.answer(state.post(path, body))

        def do_PUT(self) -> None:
            self.do_POST()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:  # a thread that is left keeps the test process from ending
        state.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def find_chromium() -> str:
    """Returns the path of Chromium, "" if there is none. FLEETPULSE_TEST_CHROMIUM is first."""
    own = os.environ.get("FLEETPULSE_TEST_CHROMIUM", "")
    names = (own, "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if name and (path := shutil.which(name))), "")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of Chromium; the test is skipped without it, unless all parts are required."""
    found = find_chromium()
    if not found:
        do_without("chromium", "no Chromium found: run 'make parts', or set FLEETPULSE_TEST_CHROMIUM to its path")
    return found
