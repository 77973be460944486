"""Grafana's dashboards in deploy/grafana: every expression and every query does what its panel says."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.api.server import create_app, start_server
from pipeline.config.sections import Api, Config
from pipeline.model.signals import CATALOGUE
from tests.pipeline.api.conftest import NOW, Open, StoreBackend
from tests.pipeline.api.test_api_federate import free_port
from tests.pipeline.api.test_api_federate import prometheus as prometheus  # a fixture
from tests.until import until

FOLDER = Path(__file__).parents[3] / "deploy" / "grafana"
BOARDS = sorted((FOLDER / "dashboards").glob("*.json"))
TARGETS = [
    (f"{board.stem}: {panel['title']}", target)
    for board in BOARDS
    for panel in json.loads(board.read_text())["panels"]
    for target in panel["targets"]
]
EXPRESSIONS = {f"{name} {target['refId']}": target["expr"] for name, target in TARGETS if "expr" in target}
QUERIES = {name: target for name, target in TARGETS if "url_options" in target}


def test_boards_have_panels_unique_ids_and_data_sources_of_variables() -> None:
    assert [board.stem for board in BOARDS] == ["fleet", "incidents", "pipeline"]
    uids = []
    for board in BOARDS:
        found = json.loads(board.read_text())
        uids.append(found["uid"])
        names = {variable["name"] for variable in found["templating"]["list"]}
        ids = [panel["id"] for panel in found["panels"]]
        assert len(ids) == len(set(ids)) > 3
        for panel in found["panels"]:
            assert panel["datasource"]["uid"].strip("${}") in names
            assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    assert len(set(uids)) == len(uids)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", QUERIES)
def test_a_query_returns_the_columns_of_its_panel(name: str, client: httpx.Client, open_incident: Open) -> None:
    open_incident("A1", "gpu:n1.0")
    target = QUERIES[name]
    answer = client.post("/api/v1/sql", json=json.loads(target["url_options"]["data"]))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert len(found["columns"]) == len(target["columns"])
    assert [column["selector"] for column in target["columns"]] == [str(i) for i in range(len(target["columns"]))]
    if "Unresolved" in name:
        assert found["rows"][0][:3] == ["A1", "page", "open"]


def substituted(expression: str) -> str:
    """Returns an expression as Grafana sends it with All chosen."""
    return expression.replace("$node", ".*").replace("$site", ".*")


SIGNALS = ("power", "temperature", "throttle_reasons", "ecc_corrected")
OWN = {
    "fleetpulse_ready": 1.0,
    "fleetpulse_lag_seconds": 2.0,
    "fleetpulse_agents": 4.0,
    "fleetpulse_agents_silent": 1.0,
    "fleetpulse_outbox": 0.0,
    "fleetpulse_store_shedding": 0.0,
    "fleetpulse_clocks_wrong": 0.0,
    "fleetpulse_sites_silent": 0.0,
    "fleetpulse_heartbeat_age_seconds": 0.1,
    "fleetpulse_judged_up_to_timestamp_seconds": 1.0,
    "fleetpulse_ingest_samples_total": 10.0,
    "fleetpulse_ingest_messages_total": 10.0,
    "fleetpulse_ingest_foreign_messages_total": 0.0,
    'fleetpulse_ingest_rejected_total{rule="time"}': 0.0,
    'fleetpulse_ingest_foreign_rejected_total{rule="time"}': 0.0,
    'fleetpulse_detector_errors_total{detector="thermal"}': 1.0,
}
"""Metrics of the pipeline, as the service reports them: tests/pipeline/api has no service."""


@pytest.fixture
def scraped(backend: StoreBackend, prometheus: str, tmp_path: Path) -> Iterator[int]:
    """Port of a Prometheus that scrapes the API with the jobs of deploy/grafana/prometheus.yml."""
    with backend.database.transaction() as connection:
        connection.execute("INSERT INTO device VALUES ('nic', 0, 'local', 'port:n1.0', 'n1', true)")
        at = [NOW]
        connection.execute(f"UPDATE latest_gpu SET {', '.join(f'{name} = 60' for name in SIGNALS)}")
        connection.execute("UPDATE latest_coolant SET supply_temperature = 20, return_temperature = 30")
        connection.execute(
            "INSERT INTO latest_nic (time, device, symbol_errors) VALUES (make_timestamptz(?), 0, 5)", at
        )
        connection.execute("INSERT INTO latest_rank (time, device, step_time) VALUES (make_timestamptz(?), 0, 2)", at)
    backend.counts = OWN
    backend.clock = lambda: time.time_ns() // 1000  # all rows are of now
    config, stop = Config(api=Api(port=0)), threading.Event()
    server = start_server(create_app(backend, config, lambda: time.time_ns() // 1000), config, stop)
    jobs = (FOLDER / "prometheus.yml").read_text().replace("fleetpulse.example:8600", f"127.0.0.1:{server.port}")
    jobs = "\n".join(line for line in jobs.splitlines() if "authorization:" not in line)
    (tmp_path / "prometheus.yml").write_text(jobs.replace("30s", "1s").replace("15s", "1s"))
    port = free_port()
    words = [prometheus, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield port
    finally:
        process.kill()
        process.wait()
        stop.set()
        server.join(5)


def ask(port: int, expression: str) -> Any:
    """Returns the answer of Prometheus, also of an error; None while it does not listen."""
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return None if error.code == 503 else json.load(error)  # 503: it starts
    except OSError:
        return None


@pytest.mark.prometheus
def test_every_expression_has_a_value_in_a_real_prometheus(scraped: int) -> None:
    left: dict[str, Any] = dict(EXPRESSIONS)
    until(lambda: ask(scraped, "up"), 60)
    end = time.monotonic() + 30
    while left and time.monotonic() < end:
        for name in list(left):
            found = ask(scraped, substituted(EXPRESSIONS[name]))
            left[name] = found
            if found["status"] == "success" and (found["data"]["result"] or EXPRESSIONS[name].endswith("> 0")):
                del left[name]
        time.sleep(0.5)  # two scrapes of a real process are a second apart
    assert left == {}


def test_names_of_federated_series_are_those_of_signals() -> None:
    text = (FOLDER / "prometheus.yml").read_text()
    for name in ("gpu.throttle_reasons", "gpu.ecc_corrected", "nic.symbol_errors", "rank.step_time", "coolant.flow"):
        assert name in CATALOGUE
        assert name.partition(".")[2] in text
