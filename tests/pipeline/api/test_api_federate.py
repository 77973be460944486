"""`/federate`: current values as Prometheus reads them, selected as in Prometheus, also by a real one."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api import federate
from pipeline.api.federate import metric_name, parse_selector, write_page
from pipeline.api.server import create_app, start_server
from pipeline.config.sections import Api, Config
from pipeline.model.errors import OverLimit, UsageError
from pipeline.model.records import SECOND
from pipeline.model.signals import CATALOGUE
from pipeline.store.latest import CurrentValues
from tests import sender_build
from tests.examples import examples
from tests.parts import do_without
from tests.pipeline.api.conftest import NOW, StoreBackend
from tests.until import until

PATH = "/federate"
CLOCK = 'fleetpulse_gpu_sm_clock{entity="gpu:n1.0",node="n1",site="local",simulated="true"} 1000 '


def page(client: httpx.Client, *selectors: str, **headers: str) -> httpx.Response:
    return client.get(PATH, params=[("match[]", s) for s in selectors], headers=headers)


def test_the_page_has_name_labels_value_and_time_of_each_current_value(client: httpx.Client) -> None:
    answer = page(client, "fleetpulse_gpu_sm_clock")
    assert answer.headers["content-type"] == federate.TEXT
    lines = answer.text.splitlines()
    assert lines[0].startswith("# HELP fleetpulse_gpu_sm_clock ")
    assert lines[1] == "# TYPE fleetpulse_gpu_sm_clock gauge"
    assert lines[2] == CLOCK + str((NOW - SECOND) // 1000)
    assert len(lines) == 6  # those of n3 are 5 minutes old


def test_open_metrics_has_times_in_seconds_and_an_end(client: httpx.Client) -> None:
    answer = page(client, "fleetpulse_gpu_sm_clock", accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"] == federate.OPEN_METRICS
    assert CLOCK + f"{(NOW - SECOND) // SECOND}.000" in answer.text
    assert answer.text.endswith("\n# EOF\n")


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("selector", "number"),
    [
        ("fleetpulse_gpu_sm_clock", 4),
        ('fleetpulse_gpu_sm_clock{node="n1"}', 2),
        ('fleetpulse_gpu_sm_clock{node!="n1"}', 2),
        ('{__name__=~"fleetpulse_gpu_.*", entity=~"gpu:n[12][.]0"}', 2),
        ('{__name__=~"fleetpulse_gpu", node="n1"}', 0),
        ("{__name__=~'fleetpulse_.*'}", 5),
        ('fleetpulse_coolant_flow{entity="cdu:c1",rack=""}', 1),
        ('fleetpulse_coolant_flow{rack="r1"}', 0),
        ('{node=`n2`,simulated="true",}', 2),
        ('fleetpulse_gpu_sm_clock{entity!~"gpu:.*"}', 0),
    ],
)
def test_selectors_select_as_in_prometheus(client: httpx.Client, selector: str, number: int) -> None:
    answer = page(client, selector)
    assert answer.status_code == 200, answer.text
    assert sum(not line.startswith("#") for line in answer.text.splitlines()) == number


def test_a_value_that_two_selectors_select_is_on_the_page_once(client: httpx.Client) -> None:
    lines = page(client, "fleetpulse_gpu_sm_clock", '{node="n1"}', '{node="n2"}').text.splitlines()
    assert sum(not line.startswith("#") for line in lines) == len(set(lines)) - 2 == 4


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    "selector",
    ["", "{}", '{node=~".*"}', "a b", 'x{node="n1"', 'x{node=n1}', 'x{node="n1" site="y"}', 'x{node=~"("}', "x" * 5000,
     '{node=~"(a+)+(?=b)"}', "x{" + ",".join('node="n1"' for _ in range(20)) + "}"],
)  # fmt: skip
def test_a_wrong_selector_is_refused_with_the_expected_form(client: httpx.Client, selector: str) -> None:
    answer = page(client, selector)
    assert (answer.status_code, answer.json()["detail"].startswith("match[]")) == (400, True), answer.text


def test_no_selector_and_too_many_are_refused(client: httpx.Client) -> None:
    assert client.get(PATH).status_code == 400
    assert page(client, *["fleetpulse_gpu_power"] * 33).status_code == 400


def test_an_expression_that_would_take_python_forever_is_answered_at_once(client: httpx.Client) -> None:
    page(client, "fleetpulse_gpu_power")  # the store is read
    begun = time.process_time()
    page(client, '{entity=~"' + "(g*)*" * 20 + 'x"}')
    assert time.process_time() - begun < 1


def test_the_page_needs_a_token_as_all_others_do(with_tokens: httpx.Client) -> None:
    assert page(with_tokens, "fleetpulse_gpu_power").status_code == 401
    assert page(with_tokens, "fleetpulse_gpu_power", authorization="Bearer ada-has-a-long-token").status_code == 200


def test_names_of_all_signals_are_unique_and_valid() -> None:
    names = [metric_name(signal) for signal in CATALOGUE.values()]
    assert len(set(names)) == len(names)
    assert all(federate._NAME.fullmatch(name) for name in names)
    assert metric_name(CATALOGUE["gpu.energy"]) == "fleetpulse_gpu_energy_total"


class OneDevice:
    """A device with any name."""

    def __init__(self, entity: str, node: str) -> None:
        self.entity, self.node = entity, node

    def names(self, device_class: str) -> list[str]:
        return [self.entity]

    def origins(self, device_class: str) -> list[tuple[str, str, bool]]:
        return [("s", self.node, False)]


def read_one(values: dict[str, np.ndarray]) -> Any:
    times = {name: np.array([NOW]) for name in values}
    found = CurrentValues(values, times, np.array([NOW]), np.zeros(1, np.int32))
    nothing = CurrentValues({}, {}, np.zeros(0, np.int64), np.zeros(0, np.int32))
    return lambda device_class: found if device_class == "custom" else nothing


@settings(max_examples=examples(200), deadline=None)
@given(entity=st.text(max_size=20), node=st.text(max_size=20), value=st.floats(width=32), wide=st.booleans())
def test_any_name_and_value_survive_the_way_through_the_format(entity, node, value, wide) -> None:
    devices = OneDevice(f"custom:{entity}", node)
    values = {"value": np.array([value], "f4"), "a.b-c": np.array([7], "u8"), "a_b_c": np.array([8], "u8")}
    text = write_page(['{site="s"}'], devices, read_one(values), NOW, wide).decode()
    lines = [line for line in text.split("\n") if line and not line.startswith("#")]
    assert lines[0].startswith("fleetpulse_custom_")
    found = {}
    for line in lines:
        name, rest = line.split("{", 1)
        labels, rest = unescape(rest)
        assert (labels["entity"], labels["node"]) == (f"custom:{entity}", node)
        number, stamp = rest.split()
        assert name not in found
        found[name] = float(number)
        assert float(stamp) * (1 if wide else 0.001) == pytest.approx(NOW / SECOND)
    assert found.get("fleetpulse_custom_a_b_c") == 7
    assert found.get("fleetpulse_custom_value", np.nan) == pytest.approx(value, nan_ok=True, rel=1e-6)


def unescape(text: str) -> tuple[dict[str, str], str]:
    """Reads labels as the text format defines them; returns what follows them."""
    labels, place = {}, 0
    while text[place] != "}":
        place += text[place] == ","
        end = text.index("=", place)
        name, value, place = text[place:end], "", end + 2
        while text[place] != '"':
            if text[place] == "\\":
                place += 1
                value += {"n": "\n"}.get(text[place], text[place])
            else:
                value += text[place]
            place += 1
        labels[name], place = value, place + 1
    return labels, text[place + 1 :]


@settings(max_examples=examples(300), deadline=None)
@given(text=st.text(alphabet="ab_{}=~!\"'`\\, \n", max_size=40))
def test_any_text_is_a_selector_or_refused(text) -> None:
    with contextlib.suppress(UsageError):
        assert parse_selector(text)


def test_a_page_over_the_bound_is_refused_and_not_cut(backend: StoreBackend, monkeypatch) -> None:
    monkeypatch.setattr(federate, "MAX_SAMPLES", 3)
    with pytest.raises(OverLimit, match="more than 3 values"):
        write_page(["fleetpulse_gpu_sm_clock"], backend.devices, backend.read_current, NOW)


# --- a real Prometheus ------------------------------------------------------------------------------------------------


@pytest.fixture
def prometheus() -> str:
    """The program that `make parts` builds, else the distribution's."""
    built = sender_build.prometheus()
    found = str(built) if built.exists() else shutil.which("prometheus")
    if found is None:
        do_without("prometheus", str(sender_build.missing(built)))
    return found


@pytest.fixture
def served(backend: StoreBackend, tmp_path):
    """The API over HTTP with tokens, whose values are of now."""
    file = tmp_path / "tokens"
    file.write_text("prometheus:a-token-for-prometheus\n")
    file.chmod(0o600)
    config, stop = Config(api=Api(port=0, token_file=file)), threading.Event()
    backend.clock = lambda: time.time_ns() // 1000
    server = start_server(create_app(backend, config, backend.clock), config, stop)
    yield server
    stop.set()
    server.join(5)


def test_promtool_accepts_the_page(client: httpx.Client) -> None:
    if shutil.which("promtool") is None:
        do_without("promtool", "no promtool here: run 'make parts'")
    text = page(client, '{__name__=~"fleetpulse_.*"}').text
    ran = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.prometheus
def test_a_real_prometheus_scrapes_the_page_with_a_token(prometheus: str, served: Any, tmp_path) -> None:
    (tmp_path / "token").write_text("a-token-for-prometheus")
    (tmp_path / "prometheus.yml").write_text(f"""
scrape_configs:
  - job_name: fleetpulse
    scrape_interval: 1s
    honor_labels: true
    metrics_path: {PATH}
    params: {{"match[]": ['{{__name__=~"fleetpulse_gpu_.*|fleetpulse_coolant_flow"}}']}}
    authorization: {{credentials_file: {tmp_path}/token}}
    static_configs: [{{targets: ["127.0.0.1:{served.port}"]}}]
""")
    port = free_port()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [prometheus, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
             f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log,
        )  # fmt: skip
    try:
        until(lambda: query(port, "fleetpulse_gpu_sm_clock"), 60)
        found = query(port, "fleetpulse_gpu_sm_clock")
        assert {(s["metric"]["entity"], s["value"][1]) for s in found} == {
            ("gpu:n1.0", "1000"), ("gpu:n1.1", "1100"), ("gpu:n2.0", "1200"), ("gpu:n2.1", "1300"),
        }  # fmt: skip
        assert [s["metric"]["node"] for s in query(port, "fleetpulse_coolant_flow")] == ["facility"]
        assert [s["value"][1] for s in query(port, "up")] == ["1"]
    finally:
        process.kill()
        process.wait()


def query(port: int, expression: str) -> list[dict[str, Any]]:
    try:
        url = f"http://127.0.0.1:{port}/api/v1/query?query={expression}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["data"]["result"]
    except OSError:
        return []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
