"""A small store with 4 nodes in 2 racks, a backend of real parts over it, and the API."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import duckdb
import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from detectors import configured
from detectors.heat.thermal import Thermal
from detectors.runner import Runner
from pipeline.acts.board import Board
from pipeline.acts.guards import Facts
from pipeline.api.backend import Calibrated, Health, SenderStates
from pipeline.api.server import create_app
from pipeline.config.acts import Acts
from pipeline.config.sections import Api, Config
from pipeline.incidents import calibrations, ledger
from pipeline.incidents import ledger as mutes
from pipeline.ingest.topic_lag import TopicLag
from pipeline.judging.mutes import Mute, check_mute, warn_unknown_scopes
from pipeline.judging.page_budget import PageBudget
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND
from pipeline.model.topology import Topology
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.store.latest import CurrentValues, LatestRows

NOW = 1_790_000_000 * SECOND
TICKS = 60
STEP = 10 * SECOND
CLOCKS = {"gpu:n1.0": 1000, "gpu:n1.1": 1100, "gpu:n2.0": 1200, "gpu:n2.1": 1300, "gpu:n3.0": 500, "gpu:n3.1": 600}
PARENTS = {
    **{gpu: (f"node:{gpu[4:6]}",) for gpu in CLOCKS},
    "node:n1": ("rack:r1",),
    "node:n2": ("rack:r1",),
    "node:n3": ("rack:r2",),
    "node:n4": ("rack:r2",),
    "rack:r1": ("cdu:c1",),
    "rack:r2": ("cdu:c2",),
    "port:n1.mlx5_0": ("node:n1", "leaf:l1"),
    "port:n3.mlx5_0": ("node:n3", "leaf:l1"),
    **{f"rank:81.{i}": (f"stage:81.{i % 2}", "job:81", gpu) for i, gpu in enumerate(CLOCKS)},
}


STANDING: Health = {
    "watermark": NOW - 30 * SECOND,
    "backlog": False,
    "lag_s": 1.5,
    "stalled": False,
    "sources": {"agents": 4, "silent": 1, "gaps": 0, "dead_letters": 0},
}


@dataclass
class StoreBackend:
    """Writes notes straight into the tables; the test sets everything else."""

    database: Database
    topology: Topology
    reasons: list[str] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    standing: Health = field(default_factory=lambda: STANDING)
    budget: PageBudget = field(default_factory=PageBudget)
    refused: list[tuple[str, str, str]] = field(default_factory=list)
    clock: Callable[[], int] = field(default=lambda: NOW)
    senders: SenderStates = field(default_factory=lambda: SenderStates({}, {}, {}, {}, ()))
    lags: dict[str, TopicLag] = field(default_factory=dict)

    def cursor(self) -> duckdb.DuckDBPyConnection:
        return self.database.cursor()

    def read_revision(self) -> object:
        return object()  # tests write into the tables

    @cached_property
    def acts(self) -> Board:
        return Board(self.database, Acts(hold="on"), self.clock, lambda act: Facts())

    @cached_property
    def devices(self) -> Devices:
        return Devices(self.database.cursor())

    @cached_property
    def latest(self) -> LatestRows:
        return LatestRows(self.database, NOW, NOW)

    def read_current(self, device_class: str, columns: Sequence[str] | None = None) -> CurrentValues:
        found = self.latest.read(device_class, self.devices, columns)
        shift = self.clock() - NOW
        times = {name: np.where(time > 0, time + shift, time) for name, time in found.times.items()}
        return replace(found, times=times)

    def acknowledge(self, incident: str, user: str, comment: str) -> Mapping[str, Any]:
        return self._note(incident, user, comment, "acknowledged", "acknowledged")

    def comment(self, incident: str, user: str, comment: str) -> Mapping[str, Any]:
        return self._note(incident, user, comment, "commented", None)

    def resolve(self, incident: str, user: str, comment: str) -> Mapping[str, Any]:
        return self._note(incident, user, comment, "resolved", "resolved")

    def mark_normal(self, incident: str, user: str, comment: str) -> Mapping[str, Any]:
        return self._note(incident, user, f"not a fault: {comment}", "resolved", "resolved")

    def act(self, verb, incident, user, version, said) -> Mapping[str, Any]:
        acts = {"acknowledge": self.acknowledge, "comment": self.comment, "resolve": self.resolve}
        made = (acts | {"not a fault": self.mark_normal})[verb](incident, user, said["comment"])
        return {**made, "version": ledger.count_history(self.database.connection, incident)}

    def record_refusal(self, user, action: str, reason: str) -> None:
        self.refused.append((str(user), action, reason))

    def record_act(self, user, action: str, target: str, reason: str = "", outcome: str = "done") -> None:
        self.refused.append((str(user), action, target, *((reason, outcome) if reason else ())))

    def add_mute(self, detector: str, scope: str, seconds: float, reason: str, user: str) -> Mapping[str, Any]:
        check_mute(detector, scope, seconds, reason, ("straggler",))
        mute = Mute("m1", detector, scope, NOW, NOW + int(seconds * SECOND), reason, user)
        with self.database.transaction() as connection:
            mutes.add_mute(connection, mute)
        return {**mute.as_json(), "warning": warn_unknown_scopes((scope,), self.topology, CLOCKS.__contains__, "local")}

    def end_mute(self, mute: str, user: str, version: int | None = None) -> Mapping[str, Any]:
        found = {m.id: m for m in mutes.load_all_mutes(self.database.connection)}[mute]
        with self.database.transaction() as connection:
            mutes.end_mute(connection, mute, user, NOW + SECOND)
        return replace(found, ended=NOW + SECOND, ended_by=user).as_json()

    def list_detectors(self) -> Sequence[Mapping[str, Any]]:
        return [{**row, "modes": self.list_modes()} for row in Runner(configured()).listing()]

    def read_calibration(self, other: int | None) -> Mapping[str, Any]:
        if other is not None:
            calibrations.load_calibration(self.database.connection, other)
        rows = self._calibrated().calibration_rows(None if other is None else self.export_calibration(other))
        shown = [{"pages": 0, "other_pages": None, "other_least_effect": None, **row} for row in rows]
        return {"rows": shown, "versions": calibrations.list_calibrations(self.database.connection)}

    def export_calibration(self, version: int | None) -> Mapping[str, Any]:
        if version is None:
            return self._calibrated().calibration()
        return calibrations.load_calibration(self.database.connection, version)

    def change_calibration(
        self, action: Calibrated, version: int | None, user: str, expected: int | None = None
    ) -> Sequence[Mapping[str, Any]]:
        with self.database.transaction() as connection:
            if version is not None:
                calibrations.load_calibration(connection, version)
            calibrations.add_calibration(connection, NOW, action, user, version, None)
        return calibrations.list_calibrations(self.database.connection)

    def _calibrated(self) -> Runner:
        thermal = Thermal()
        noise, groups = np.random.default_rng(1).normal(0, 0.02, (180, 64)), np.zeros(64, np.int32)
        for tick, row in enumerate(noise, 1):
            thermal.cores.step(row, groups, tick * 60 * SECOND)
        return Runner([thermal])

    def list_budgets(self) -> Sequence[Mapping[str, Any]]:
        return self.budget.list_rows(("straggler", "xid"))

    def reset_budget(self, detector: str, user: str) -> Sequence[Mapping[str, Any]]:
        if detector not in ("straggler", "xid"):
            raise UsageError(f"detector = {detector!r}: no such detector")
        self.budget.review({}, 1000.0, NOW)
        return self.list_budgets()

    def list_modes(self) -> Sequence[Mapping[str, Any]]:
        return [{"detector": "*", "scope": "rack:r1", "mode": "record"}]

    def read_health(self) -> Health:
        return self.standing

    def read_senders(self) -> SenderStates:
        return self.senders

    def read_lags(self) -> Mapping[str, TopicLag]:
        return self.lags

    def list_unready_reasons(self) -> list[str]:
        return self.reasons

    def list_evaluation_faults(self) -> list[str]:
        return self.reasons

    def read_counters(self) -> Mapping[str, float]:
        return self.counts

    def _note(self, incident: str, user: str, comment: str, kind: str, state: str | None) -> Mapping[str, Any]:
        with self.database.transaction() as connection:
            connection.execute("UPDATE incidents SET state = coalesce(?, state) WHERE id = ?", [state, incident])
            stored = ledger.read_incident(connection, incident)
            connection.execute(
                """INSERT INTO history SELECT ?, count(*), make_timestamptz(?), ?, ?, ?, ? FROM history
                   WHERE incident = ?""",
                [incident, NOW, kind, user, comment, json.dumps(stored), incident],
            )
        return {k: v for k, v in stored.items() if k not in ("findings", "history", "notifications")}


class InProcess(httpx.BaseTransport):
    """Sends requests to an application without a socket, each in a new event loop."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return asyncio.run(self._send(request))

    async def _send(self, request: httpx.Request) -> httpx.Response:
        async with httpx.ASGITransport(self.app, raise_app_exceptions=False) as transport:
            answer = await transport.handle_async_request(request)
            return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())


@pytest.fixture
def now() -> int:
    """Current time of the API, in microseconds."""
    return NOW


@pytest.fixture(scope="session")
def template_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store that has everything except incidents; made once and copied for each test."""
    path = tmp_path_factory.mktemp("template_store") / "store.duckdb"
    opened = Database(path)
    with opened.transaction() as connection:
        _fill(connection)
    opened.close()
    return path


@pytest.fixture
def database(tmp_path: Path, template_store: Path) -> Iterator[Database]:
    opened = Database(Path(shutil.copy(template_store, tmp_path)))
    yield opened
    opened.close()


@pytest.fixture
def backend(database: Database) -> StoreBackend:
    return StoreBackend(database, Topology(PARENTS))


@pytest.fixture
def client(backend: StoreBackend) -> httpx.Client:
    """The API on loopback without tokens, as a program on this machine uses it."""
    app = create_app(backend, Config(), lambda: NOW)
    return httpx.Client(transport=InProcess(app), base_url="http://127.0.0.1:8600")


@pytest.fixture
def with_tokens(backend: StoreBackend, tmp_path: Path) -> httpx.Client:
    """The API beyond loopback; `ada` and `bob` have tokens."""
    file = tmp_path / "tokens"
    file.write_text("# people\nada:ada-has-a-long-token\nbob:bob-has-a-long-token\n")
    config = Config(api=Api(host="0.0.0.0", token_file=file))
    app = create_app(backend, config, lambda: NOW)
    return httpx.Client(transport=InProcess(app), base_url="http://fleet.example.org")


Open = Callable[..., None]


@pytest.fixture
def open_incident(database: Database) -> Open:
    """Writes one incident: open_incident(id, cause, severity="page", members=(), state="open")."""

    def write(
        number: str, cause: str, severity: str = "page", members: tuple[str, ...] = (), state: str = "open"
    ) -> None:
        with database.transaction() as connection:
            connection.execute(
                """INSERT INTO incidents SELECT $id, $cause, t, t, NULL, $severity, $members, 0.9, $state,
                   'something is wrong', true, 'straggler', $cause, t, NULL, NULL
                   FROM (SELECT make_timestamptz($time) AS t)""",
                {
                    "id": number,
                    "cause": cause,
                    "severity": severity,
                    "members": list(members) or [cause],
                    "state": state,
                    "time": NOW - 600 * SECOND,
                },
            )

    return write


def _fill(connection: duckdb.DuckDBPyConnection) -> None:
    """Writes 10 minutes of GPU telemetry; n3 is silent for 5 minutes, n4 only announced; one sender has no node."""
    for entity, above in PARENTS.items():
        kind = entity.partition(":")[0]
        connection.execute(
            """INSERT INTO entity (entity, kind, site, simulated, parents, attributes)
               VALUES (?, ?, 'local', true, ?, '{}')""",
            [entity, kind, list(above)],
        )
    for number, (gpu, clock) in enumerate(CLOCKS.items()):
        node = gpu[4:6]
        connection.execute("INSERT INTO device VALUES ('gpu', ?, 'local', ?, ?, true)", [number, gpu, node])
        last = NOW - (300 * SECOND if node == "n3" else SECOND)
        # every second clock value is missing; the energy counter rises by 3000 a second and is reset once
        connection.execute(
            """INSERT INTO hot_gpu (time, device, sm_clock, energy, temperature)
               SELECT make_timestamptz($last - i * $step), $number, CASE WHEN i % 2 = 0 THEN $clock END,
                      1 + ($ticks - i) * 30000 - CASE WHEN i < 10 AND $number = 0 THEN 1400000 ELSE 0 END,
                      CASE WHEN i = 3 THEN 'nan'::FLOAT ELSE 40 END
               FROM range($ticks) r(i)""",
            {"last": last, "step": STEP, "number": number, "clock": clock, "ticks": TICKS},
        )
        connection.execute(
            "INSERT INTO latest_gpu (time, device, sm_clock) VALUES (make_timestamptz(?), ?, ?)", [last, number, clock]
        )
    connection.execute("INSERT INTO device VALUES ('coolant', 0, 'local', 'cdu:c1', 'facility', true)")
    connection.execute("INSERT INTO latest_coolant (time, device, flow) VALUES (make_timestamptz(?), 0, 200)", [NOW])
    connection.execute("INSERT INTO device VALUES ('disk', 0, 'local', 'disk:n1.nvme0', 'n1', true)")
    for i in range(6):
        connection.execute("INSERT INTO device VALUES ('rank', ?, 'local', ?, ?, true)", [i, f"rank:81.{i}", "n1"])
