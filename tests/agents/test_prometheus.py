"""Scraping other exporters: their metrics become our signals, the rest custom signals."""

from __future__ import annotations

import http.server
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.collector import Reading
from agents.collectors.exporters import scraper as fetching
from agents.collectors.exporters.prometheus import Endpoint, Prometheus
from agents.collectors.exporters.scraper import EndpointScraper, PageFetcher, ScrapeError
from agents.collectors.exporters.translation import merge_values, parse_page, translate_page
from agents.collectors.registry import configured_collectors
from pipeline.foreign.mapping import MappedMetric, MetricMapping, list_shipped, load_mapping
from pipeline.model.errors import ConfigError
from pipeline.model.signals import CATALOGUE
from tests.examples import examples
from tests.parts import do_without

DCGM = """# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-a",modelName="NVIDIA H100",Hostname="gpu7"} 41
DCGM_FI_DEV_GPU_TEMP{gpu="1",UUID="GPU-b",modelName="NVIDIA H100",Hostname="gpu7"} 43
DCGM_FI_DEV_GPU_TEMP{gpu="1",UUID="GPU-b",modelName="NVIDIA H100",GPU_I_ID="3",Hostname="gpu7"} 44
# TYPE DCGM_FI_DEV_MEMORY_TEMP gauge
DCGM_FI_DEV_MEMORY_TEMP{gpu="0",UUID="GPU-a",modelName="NVIDIA H100",Hostname="gpu7"} 9223372036854775794
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",modelName="NVIDIA H100",Hostname="gpu7"} 512
# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0",UUID="GPU-a",modelName="NVIDIA H100",Hostname="gpu7"} 9007199254740991
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-a",modelName="NVIDIA H100",Hostname="gpu7"} 79
"""
SWITCH = """# TYPE infiniband_switch_info gauge
infiniband_switch_info{guid="0x10",switch="leaf-1",lid="4"} 1
# TYPE infiniband_switch_port_symbol_error_total counter
infiniband_switch_port_symbol_error_total{guid="0x10",port="17"} 12
infiniband_switch_port_symbol_error_total{guid="0x20",port="3"} 1
"""
IF_MIB = """# TYPE ifOperStatus gauge
ifOperStatus{ifIndex="1",ifName="Ethernet0",ifAlias="gpu7 p0"} 1
ifOperStatus{ifIndex="2",ifName="Ethernet4",ifAlias=""} 2
ifOperStatus{ifIndex="3",ifName="Ethernet8",ifAlias=""} 3
# TYPE ifHCInOctets counter
ifHCInOctets{ifIndex="1",ifName="Ethernet0",ifAlias="gpu7 p0"} 1.0e+06
"""
GIVEN = {"target": "t1", "node": "n1"}


def rows(text: str, mapping: str, most: int = 100) -> dict[str, dict[str, dict[str, float]]]:
    return translate_page(parse_page(text), load_mapping(mapping), GIVEN, most).rows


# --- reading a page --------------------------------------------------------------------------------------------------


def test_an_invalid_line_costs_only_itself() -> None:
    found = parse_page('# TYPE a counter\na{x="1"} 5\nb{ 7\nc "x" y\nd 3\n')
    assert [(s.name, s.value, s.kind) for s in found.series] == [("a", 5.0, "counter"), ("d", 3.0, "unknown")]
    assert found.bad == 2


def test_openmetrics_with_exemplars_and_timestamps_is_read_too() -> None:
    text = '# TYPE hits counter\nhits_total{a="b"} 17 1520879607.789 # {id="x"} 0.5\n# EOF\n'
    assert [(s.name, dict(s.labels), s.value, s.kind) for s in parse_page(text).series] == [
        ("hits_total", {"a": "b"}, 17.0, "counter")
    ]


@given(st.text(alphabet='ab_{}="\\\n #,1.5e+NaI', max_size=200))
@settings(max_examples=examples(300), deadline=None)
def test_no_text_breaks_the_parser(text: str) -> None:
    found = parse_page(text)
    assert len(found.series) + found.bad <= text.count("\n") + 1


# --- mappings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_shipped())
def test_every_shipped_mapping_names_signals_of_the_catalogue_and_its_source(name: str) -> None:
    names = load_mapping(name)
    assert names.metric
    assert names.source
    assert all(metric.signal in CATALOGUE for metric in names.metric)


def test_gpus_of_dcgm_exporter_get_our_signals_units_and_attributes() -> None:
    found = translate_page(parse_page(DCGM), load_mapping("dcgm-exporter"), GIVEN, 100)
    assert found.rows["gpu"] == {
        "gpu:gpu7.0": {"gpu.temperature": 41.0, "gpu.memory_used": 512 * 2.0**20, "gpu.energy": 9007199254740991.0},
        "gpu:gpu7.1": {"gpu.temperature": 43.0},
    }
    gpu = found.devices["gpu:gpu7.0"]
    assert (gpu.parents, dict(gpu.attributes)) == (("node:gpu7",), {"sku": "NVIDIA H100", "uuid": "GPU-a"})


def test_a_permanent_last_xid_and_mig_instances_are_only_custom_signals() -> None:
    kept = rows(DCGM, "dcgm-exporter")["custom"]
    assert sorted(name.partition("{")[0] for name in kept) == [
        "custom:t1.DCGM_FI_DEV_GPU_TEMP",
        "custom:t1.DCGM_FI_DEV_XID_ERRORS",
    ]


def test_switch_ports_are_named_by_a_lookup_or_their_guid() -> None:
    assert rows(SWITCH, "infiniband_exporter")["nic"] == {
        "port:leaf-1.17": {"nic.symbol_errors": 12.0},
        "port:0x20.3": {"nic.symbol_errors": 1.0},
    }


def test_power_shelves_and_leak_detectors_of_redfish_exporter_get_our_signals() -> None:
    text = (
        'redfish_powershelf_input_power{power_supply_id="ps1"} 2900\nredfish_powershelf_power_load 61\n'
        'redfish_chassis_leak_detector_health{chassis_id="c",leak_detector_id="d1",leak_detection_id="x"} 3\n'
    )
    assert {c: r for c, r in rows(text, "redfish_exporter").items() if c != "custom"} == {
        "psu": {"psu:t1.ps1": {"psu.input_power": 2900.0}},
        "power": {"shelf:t1": {"power.load": 0.61}},
        "leak": {"leak_detector:t1.c.d1": {"leak.state": 2.0}},
    }


def test_states_are_translated_and_unknown_ones_are_missing() -> None:
    found = rows(IF_MIB, "snmp_if_mib")["nic"]
    assert found["port:t1.Ethernet0"] == {"nic.state": 1.0, "nic.rx_bytes": 1e6}
    assert found["port:t1.Ethernet4"] == {"nic.state": 0.0}
    assert found["port:t1.Ethernet8"]["nic.state"] != found["port:t1.Ethernet8"]["nic.state"]


def test_several_series_of_one_device_are_merged_by_the_mappings_rule() -> None:
    text = "".join(
        f'node_cpu_seconds_total{{cpu="{c}",mode="{m}"}} {v}\n' for c in (0, 1) for m, v in (("idle", 5), ("user", 2))
    )
    node = rows(text, "node_exporter")["node"]["node:n1"]
    assert (node["node.cpu_count"], node["node.cpu_idle_time"], node["node.cpu_busy_time"]) == (2.0, 10_000.0, 4_000.0)
    values = [1.0, 4.0]
    wanted = {"sum": 5.0, "mean": 2.5, "min": 1.0, "max": 4.0, "count": 2.0}
    assert {how: merge_values(MappedMetric("a", "gpu.power", merge=how), values) for how in wanted} == wanted  # type: ignore[arg-type]


def test_different_values_without_a_merge_rule_are_missing() -> None:
    assert merge_values(MappedMetric("a", "gpu.power"), [2.0, 2.0]) == 2.0
    assert str(merge_values(MappedMetric("a", "gpu.power"), [2.0, 3.0])) == "nan"


def test_unmapped_series_are_kept_with_labels_and_type_up_to_the_limit() -> None:
    text = "# TYPE wafer_temperature gauge\n" + "".join(f'wafer_temperature{{die="{i}"}} {i}\n' for i in range(5))
    found = translate_page(parse_page(text), load_mapping(""), GIVEN, 3)
    assert list(found.rows["custom"]) == [f"custom:t1.wafer_temperature{{die={i}}}" for i in range(3)]
    device = found.devices["custom:t1.wafer_temperature{die=0}"]
    assert device.parents == ("node:n1",)
    assert device.attributes["labels"] == {"die": "0"}
    assert device.attributes["type"] == "gauge"
    assert (found.mapped, found.unmapped, found.dropped) == (0, 5, 2)


def test_labels_of_a_hostile_exporter_make_no_entity() -> None:
    names = ("x" * 300, "a\\nb")
    text = "".join(f'DCGM_FI_DEV_GPU_TEMP{{gpu="0",Hostname="{name}"}} 1\n' for name in names)
    assert set(rows(text, "dcgm-exporter")) <= {"custom"}
    assert all(len(name) <= 420 for name in rows(text, "dcgm-exporter").get("custom", {}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 2", "version = 2; expected 1"),
        ('version = 1\n[entities]\ngpus = "gpu:x"', "'gpus' is not a device class"),
        ('version = 1\n[[metric]]\nname = "a"\nsignal = "gpu.heat"', "signal = 'gpu.heat' is not in the catalogue"),
        ('version = 1\n[[metric]]\nname = "a"\nsignal = "gpu.power"', "expected one of the class gpu"),
        (
            'version = 1\n[[metric]]\nname = "a"\nsignal = "gpu.power"\nentity = "gpu:1"\nwhere = { m = "(" }',
            "is not a regular expression",
        ),
        (
            'version = 1\n[[metric]]\nname = "a"\nsignal = "nic.state"\nentity = "port:1"\nstates = { "1" = "on" }',
            "state 'on'; nic.state has down, up",
        ),
        ('version = 1\n[[metrics]]\nname = "a"', "did you mean 'metric'"),
        ("version", "Expected"),
    ],
)
def test_an_invalid_mapping_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_mapping(str(path))
    assert message in str(refused.value)
    assert "own.toml" in str(refused.value)


def test_a_missing_mapping_is_refused_with_the_available_ones() -> None:
    with pytest.raises(ConfigError, match=r"expected a file, or one of dcgm-exporter, "):
        load_mapping("dcgm")


# --- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ({"name": "a", "url": "ftp://x/"}, "expected http:// or https://"),
        ({"name": "a", "url": "http://8.8.8.8/metrics"}, "https to public ones"),
        ({"name": "a", "url": "http://user:word@x/"}, "no user name in it"),
        ({"name": "a", "url": "http://x/", "mapping": "dcgm"}, "expected a file, or one of"),
        ({"name": "a", "url": "http://x/", "interval": 0}, "seconds, 1 to 3600"),
        ({"name": "a", "url": "http://x/", "custom": 10**6}, "0 to 5000"),
        ({"name": "a\nb", "url": "http://x/"}, "printable characters"),
    ],
)
def test_an_invalid_endpoint_is_refused(endpoint: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured_collectors({"prometheus": {"endpoints": [endpoint]}}, "f.toml")
    assert message in str(refused.value)


def test_without_an_endpoint_the_agent_makes_no_worker_for_it() -> None:
    assert not any(isinstance(c, Prometheus) for c in configured_collectors({}, "f.toml"))
    made = configured_collectors({"prometheus": {"endpoints": [{"name": "a", "url": "http://127.0.0.1:1/"}]}}, "f.toml")
    assert any(isinstance(c, Prometheus) for c in made)


# --- over HTTP -------------------------------------------------------------------------------------------------------


@contextmanager
def exporter(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A real HTTP server with the given answers."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def respond_with(text: str, status: int = 200, **headers: str) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(text.encode())

    return answer


def read_until(collector: Prometheus, until: Callable[[list[Reading]], bool], limit: float = 10.0) -> list[Reading]:
    """Reads until the readings are enough."""
    found: list[Reading] = []
    end = time.monotonic() + limit
    while not until(found):
        assert time.monotonic() < end, found
        found += collector.read()
        time.sleep(0.01)
    return found


def values(readings: list[Reading], signal: str) -> dict[str, float]:
    return {
        entity: float(r.columns[signal][i])
        for r in readings
        if signal in r.columns
        for i, entity in enumerate(r.entities)
    }


def test_a_hung_endpoint_delays_no_other_and_is_reported_as_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, exporter(respond_with(DCGM)) as url:
        deaf = f"http://127.0.0.1:{silent.getsockname()[1]}/metrics"
        made = Prometheus(
            endpoints=(Endpoint("deaf", deaf, timeout=0.5), Endpoint("dcgm", url, "dcgm-exporter", interval=3600.0))
        )
        made.open("n1")
        try:
            first = read_until(made, lambda found: bool(values(found, "gpu.temperature")), limit=5.0)
            assert values(first, "gpu.temperature") == {"gpu:gpu7.0": 41.0, "gpu:gpu7.1": 43.0}
            rest = first + read_until(made, lambda found: "exporter:deaf" in values(found, "exporter.up"))
        finally:
            made.close()
    assert values(rest, "exporter.up") == {"exporter:dcgm": 1.0, "exporter:deaf": 0.0}
    (event,) = [e for r in rest for e in r.events]
    assert (event.kind, event.entity, event.data["state"]) == ("exporter", "exporter:deaf", "down")
    assert "timed out" in event.data["reason"]


def test_each_value_is_read_once_and_an_outage_is_reported_once_with_its_end() -> None:
    pages = iter([respond_with("a 1\n"), respond_with("no", 503), respond_with("no", 503), respond_with("a 2\n")])
    with exporter(lambda handler: next(pages, respond_with("a 3\n"))(handler)) as url:
        made = Prometheus(endpoints=(Endpoint("x", url, interval=3600.0),))
        made.open("n1")
        try:
            found = read_until(made, lambda found: bool(values(found, "custom.value")))
            assert made.read() == ()
            (scraper,) = made._scrapers
            events = [e for _ in range(3) for r in _scraped(made, scraper) for e in r.events]
        finally:
            made.close()
    assert values(found, "custom.value") == {"custom:x.a": 1.0}
    assert [(e.data["state"], e.data["reason"]) for e in events] == [
        ("down", "answered 503 Service Unavailable; expected 200"),
        ("up", ""),
    ]


def test_its_inventory_is_renewed_only_when_devices_change() -> None:
    pages = iter(
        [
            respond_with("a 1\n"),
            respond_with("a 2\n"),
            respond_with("b 1\n"),
            respond_with("", 503),
            respond_with("b 2\n"),
        ]
    )
    with exporter(lambda handler: next(pages, respond_with("b 3\n"))(handler)) as url:
        made = Prometheus(endpoints=(Endpoint("x", url, interval=3600.0),))
        made.open("n1")
        try:
            read_until(made, lambda found: bool(values(found, "custom.value")))
            renewed = [made.inventory_changed()]
            for _ in range(4):
                _scraped(made, made._scrapers[0])
                renewed.append(made.inventory_changed())
            known = set(made.inventory())
        finally:
            made.close()
    assert renewed == [True, False, True, False, False]
    assert known == {"custom:x.b", "exporter:x"}


def _scraped(made: Prometheus, scraper: Any) -> tuple[Reading, ...]:
    """Returns the collector's readings of one more scrape."""
    scraper._newest = scraper.scrape()
    return made.read()


def test_an_unexpected_error_ends_one_scrape_and_not_the_thread() -> None:
    class Broken(PageFetcher):
        def __call__(self) -> str:
            raise RuntimeError("unexpected value")

    scrape = EndpointScraper(Broken("http://127.0.0.1:1/", 1.0), load_mapping(""), GIVEN, 3600.0, 10).scrape()
    assert scrape.reason == "RuntimeError: unexpected value"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (respond_with("x" * 2_000_000), "more than"),
        (respond_with("", 302, Location="http://127.0.0.1:9/"), "answered 302"),
        (respond_with("a 1\n", **{"Content-Length": "50"}), "closed 46 bytes before the end of the page"),
    ],
)
def test_too_long_incomplete_and_redirected_pages_are_refused(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[http.server.BaseHTTPRequestHandler], None], message: str
) -> None:
    monkeypatch.setattr(fetching, "MAX_PAGE_BYTES", 1 << 20)
    with exporter(answer) as url, pytest.raises(ScrapeError, match=message.replace(" ", r"\s")):
        PageFetcher(url, 5.0)()


def test_a_slowly_dripping_page_times_out() -> None:
    stop = threading.Event()

    def drip(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not stop.wait(0.05):
            try:
                handler.wfile.write(b"a")
                handler.wfile.flush()
            except OSError:
                return

    with exporter(drip) as url:
        began = time.monotonic()
        with pytest.raises(ScrapeError, match=r"timed out: no whole page within 0\.4 s"):
            PageFetcher(url, 0.4)()
        stop.set()
    assert time.monotonic() - began < 3.0


def test_a_token_is_sent_and_never_logged(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("sesame\n")
    token.chmod(0o600)
    seen: list[str | None] = []

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers.get("Authorization"))
        respond_with("", 401)(handler)

    with exporter(answer) as url, pytest.raises(ScrapeError) as refused:
        PageFetcher(url, 5.0, token_file=token)()
    assert seen == ["Bearer sesame"]
    assert "sesame" not in str(refused.value)


# --- a real exporter -------------------------------------------------------------------------------------------------


@pytest.fixture
def node_exporter() -> Iterator[str]:
    """A real node_exporter."""
    program = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
    if program is None:
        do_without("node_exporter", "no prometheus-node-exporter here; run 'make parts'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    child = subprocess.Popen([program, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL)
    try:
        yield f"http://{address}/metrics"
    finally:
        child.terminate()
        child.wait(10)


@pytest.mark.slow
def test_a_real_node_exporter_matches_our_own_collectors(node_exporter: str) -> None:
    made = Prometheus(endpoints=(Endpoint("here", node_exporter, "node_exporter", interval=1.0),))
    made.open("n1")
    try:
        found = read_until(made, lambda found: bool(values(found, "node.memory_total")))
        inventory = made.inventory()
    finally:
        made.close()
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert values(found, "node.memory_total") == {"node:n1": float(memory["MemTotal"].split()[0]) * 1024}
    assert values(found, "nic.rx_bytes")["port:n1.lo"] >= 0 if "port:n1.lo" in values(found, "nic.rx_bytes") else True
    up = values(found, "exporter.mapped")["exporter:here"]
    assert up >= 40
    assert values(found, "exporter.bad_lines") == {"exporter:here": 0.0}
    assert {e for r in found for e in r.entities} <= inventory.keys()
    assert not {"gpu", "coolant"} & {r.device_class for r in found}


def test_a_mapping_can_be_built_without_a_file() -> None:
    names = MetricMapping(
        1, entities={"gpu": "gpu:{target}.{id}"}, metric=(MappedMetric("die_watts", "gpu.power", scale=1000.0),)
    )
    found = translate_page(parse_page('die_watts{id="4"} 0.25\n'), names, GIVEN, 10)
    assert found.rows == {"gpu": {"gpu:t1.4": {"gpu.power": 250.0}}}


# --- details of a mapping --------------------------------------------------------------------------------------------


def test_a_label_must_match_completely() -> None:
    metric = MappedMetric("cpu", "node.cpu_utilization", where={"mode": "user|nice"})
    taken = [
        mode for mode in ("user", "nice", "user_guest", "niceness", "no user", "") if metric.matches({"mode": mode})
    ]
    assert taken == ["user", "nice"]
    assert not metric.matches({})


def test_a_value_is_scaled_and_then_offset() -> None:
    names = MetricMapping(
        1, entities={"gpu": "gpu:{node}.0"}, metric=(MappedMetric("k", "gpu.temperature", 0.1, offset=-273.15),)
    )
    found = translate_page(parse_page("k 3131.5\n"), names, GIVEN, 0).rows["gpu"]["gpu:n1.0"]["gpu.temperature"]
    assert found == pytest.approx(40.0)


def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        dead = f"http://127.0.0.1:{free.getsockname()[1]}"
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, dead)
    with exporter(respond_with("a 1\n")) as url:
        assert PageFetcher(url, 5.0)() == "a 1\n"
