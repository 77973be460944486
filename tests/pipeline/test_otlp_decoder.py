"""OTLP requests of any sender: accepted and refused ones, and that bad input is refused without other effects."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.foreign import repeats
from pipeline.foreign.otlp import OtlpDecoder
from pipeline.foreign.plan import MAX_JOINED
from pipeline.foreign.repeats import RepeatedMessages
from pipeline.foreign.walker import Walker
from pipeline.model.errors import WireError
from tests.examples import examples
from tests.pipeline.otlp_requests import T0_NS, Request, gpu_request, set_attributes

T0 = T0_NS // 1000
Row = dict[tuple[str, str, int], float]


def decoder() -> OtlpDecoder:
    return OtlpDecoder("site", ("host.id", "host.name"))


def read(message: bytes, using: OtlpDecoder | None = None) -> Row:
    """(entity, signal, time) -> value, for all values that are not missing."""
    found: Row = {}
    for samples in (using or decoder()).decode(message):
        for node in samples.nodes:
            at = 0
            for b, (_, signals, rows) in enumerate(node.shape.blocks):
                names = node.part.layout.blocks[b].entities
                for name, code in signals:
                    cells = node.cells[at : at + rows]
                    at += rows
                    for r, cell in enumerate(cells):
                        key = (names[node.shape.row_entity[b][r]], name, int(node.times[node.shape.row_tick[b][r]]))
                        value = float(cell.view("f8")) if code[0] == "f" else float(cell)
                        missing = math.isnan(value) if code[0] == "f" else int(cell) == (1 << 64) - 1
                        if not missing:
                            assert key not in found
                            found[key] = value
    return found


def dropped(message: bytes) -> dict[str, int]:
    return {k: n for samples in decoder().decode(message) for k, n in samples.dropped.items() if n}


def faults(message: bytes) -> list[str]:
    return [fault for samples in decoder().decode(message) for fault in samples.faults]


def test_hardware_conventions_become_signals_and_unknown_metrics_custom_ones() -> None:
    assert read(gpu_request()) == {
        ("gpu:n1.0", "gpu.temperature", T0): 40.0,
        ("gpu:n1.1", "gpu.temperature", T0): 41.0,
        ("gpu:n1.0", "gpu.energy", T0): 1_000_000.0,
        ("gpu:n1.1", "gpu.energy", T0): 1_001_000.0,
        ("custom:n1.vendor.thing{slot=0}", "custom.value", T0): 0.5,
        ("custom:n1.vendor.thing{slot=1}", "custom.value", T0): 1.5,
    }


def test_a_known_layout_is_read_from_the_cache_with_new_values_and_times() -> None:
    one = decoder()
    read(gpu_request(), one)
    later = read(gpu_request(time=T0_NS + 5_000_000_000, first=50.0), one)
    assert later["gpu:n1.1", "gpu.temperature", T0 + 5_000_000] == 51.0
    assert len(one._plans) == 1


def test_another_node_and_a_changed_layout_are_not_taken_for_the_known_one() -> None:
    one = decoder()
    read(gpu_request(), one)
    assert ("gpu:n2.0", "gpu.temperature", T0) in read(gpu_request("n2"), one)
    assert len(read(gpu_request(gpus=3), one)) == 9
    assert len(one._plans) == 3


def test_counters_above_two_to_the_53_stay_exact() -> None:
    value = (1 << 60) + 1
    request = Request().sum("hw.network.io", value, hw__id="port:n1.eth0", network__io__direction="receive")
    (samples, _) = decoder().decode(request.encode())
    assert int(samples.nodes[0].cells[0]) == value


def test_exporter_names_of_dcgm_and_node_exporter_map_to_signals_of_the_node() -> None:
    request = Request("n7")
    request.gauge("DCGM_FI_DEV_GPU_TEMP", 61, gpu="3", Hostname="pod-x", UUID="GPU-1")
    request.gauge("DCGM_FI_DEV_GPU_UTIL", 50.0, gpu="3", Hostname="pod-x", UUID="GPU-1")
    request.sum("node_cpu_seconds_total", 10.0, cpu="0", mode="idle").sum(
        "node_cpu_seconds_total", 20.0, cpu="1", mode="idle"
    )
    request.gauge("node_load1", 1.5)
    found = read(request.encode())
    assert found["gpu:n7.3", "gpu.temperature", T0] == 61
    assert found["gpu:n7.3", "gpu.utilization", T0] == 0.5
    assert found["node:n7", "node.cpu_idle_time", T0] == 30_000
    assert found["node:n7", "node.cpu_count", T0] == 2
    assert found["node:n7", "node.load1", T0] == 1.5


def test_the_node_is_host_id_then_host_name_then_a_label_then_the_scraped_address() -> None:
    assert ("custom:id.m", "custom.value", T0) in read(Request("name", host_id="id").gauge("m", 1.0).encode())
    assert ("custom:name.m", "custom.value", T0) in read(Request("name").gauge("m", 1.0).encode())
    labelled = Request("").gauge("m", 1.0, Hostname="n9").encode()
    assert ("custom:n9.m{Hostname=n9}", "custom.value", T0) in read(labelled)
    scraped = read(Request("", service_instance_id="n8:9400").gauge("m", 1.0).encode())
    assert [entity for entity, _, _ in scraped] == ["custom:n8.m{service.instance.id=n8:9400}"]


def test_values_without_a_node_are_refused_with_the_reason_and_the_rest_is_read() -> None:
    message = Request("").gauge("m", 1.0).node("n1").gauge("m", 2.0).encode()
    assert list(read(message).values()) == [2.0]
    assert faults(message) == ["1 values without a node: expected one of the resource attributes host.id, host.name"]


def test_delta_sums_are_kept_as_custom_signals_not_as_counters() -> None:
    found = read(Request().sum("hw.energy", 5.0, delta=True, hw__id="gpu:n1.0", hw__type="gpu").encode())
    assert found == {("custom:n1.hw.energy{hw.id=gpu:n1.0,hw.type=gpu}", "custom.value", T0): 5.0}


def test_histograms_and_summaries_become_counts_sums_extremes_and_quantiles() -> None:
    request = Request()
    plain = request.scope.metrics.add(name="h").histogram.data_points.add(
        time_unix_nano=T0_NS, count=4, sum=10.0, min=1.0, max=5.0, bucket_counts=[1, 2, 1], explicit_bounds=[2.0, 4.0]
    )
    plain.exemplars.add(as_double=1.0)
    set_attributes(plain, {"k": "v"})
    fine = request.scope.metrics.add(name="e").exponential_histogram.data_points.add(
        time_unix_nano=T0_NS, count=3, sum=6.0, min=0.5, max=3.5, scale=2, zero_count=1
    )
    fine.positive.bucket_counts.extend([1, 1])
    set_attributes(fine, {"k": "v"})
    short = request.scope.metrics.add(name="s").summary.data_points.add(time_unix_nano=T0_NS, count=7, sum=14.0)
    for quantile in (0.5, 0.99):
        short.quantile_values.add(quantile=quantile, value=10 * quantile)
    found = {entity: value for (entity, _, _), value in read(request.encode()).items()}
    ends = {"count": (4, 3), "sum": (10, 6), "min": (1, 0.5), "max": (5, 3.5)}
    assert found == {
        **{f"custom:n1.h_{end}{{k=v}}": plain for end, (plain, _) in ends.items()},
        **{f"custom:n1.e_{end}{{k=v}}": fine for end, (_, fine) in ends.items()},
        "custom:n1.s_count": 7,
        "custom:n1.s_sum": 14,
        "custom:n1.s{quantile=0.5}": 5,
        "custom:n1.s{quantile=0.99}": 9.9,
    }
    assert dropped(request.encode()) == {"exemplars": 1, "buckets": 4}


def test_states_become_the_numbers_of_the_catalogue() -> None:
    request = Request()
    for state, value in (("ok", 0), ("degraded", 0), ("failed", 1)):
        request.sum("hw.status", value, hw__id="0", hw__type="power_supply", hw__state=state)
    request.sum("hw.network.up", 0, hw__id="eth0")
    found = read(request.encode())
    assert found == {("psu:n1.0", "psu.status", T0): 2, ("port:n1.eth0", "nic.state", T0): 0}


def test_a_missing_value_is_no_value_and_its_row_stays() -> None:
    one = decoder()
    read(Request().gauge("m", 1.0).gauge("m", 2.0, k="v").encode(), one)
    assert list(read(Request().gauge("m", None).gauge("m", 2.0, k="v").encode(), one).values()) == [2.0]
    assert read(Request().gauge("m", math.nan).encode()) == {}


def test_times_within_a_tenth_of_a_second_are_one_tick_and_others_several() -> None:
    request = Request().gauge("node_load1", 1.0).gauge("node_load5", 2.0, T0_NS + 50_000_000)
    request.gauge("node_load1", 3.0, T0_NS + 1_000_000_000)
    assert read(request.encode()) == {
        ("node:n1", "node.load1", T0): 1.0,
        ("node:n1", "node.load5", T0): 2.0,
        ("node:n1", "node.load1", T0 + 1_000_000): 3.0,
    }


def test_a_series_with_two_values_within_a_tenth_of_a_second_keeps_both() -> None:
    request = Request().gauge("m", 1.0).gauge("m", 2.0, T0_NS + 20_000_000)
    assert sorted(read(request.encode()).values()) == [1.0, 2.0]


def test_two_scopes_with_one_metric_stay_two_series() -> None:
    request = Request().gauge("m", 1.0)
    request.scope = request.resource.scope_metrics.add()
    request.scope.scope.name = "other"
    found = read(request.gauge("m", 2.0).encode())
    assert {entity: value for (entity, _, _), value in found.items()} == {
        "custom:n1.m": 1.0,
        "custom:n1.m{otel.scope.name=other}": 2.0,
    }


def test_series_without_a_rule_to_merge_them_stay_custom_signals() -> None:
    request = (
        Request()
        .gauge("DCGM_FI_DEV_GPU_TEMP", 60.0, gpu="0", pod="a")
        .gauge("DCGM_FI_DEV_GPU_TEMP", 61.0, gpu="0", pod="b")
    )
    assert sorted(signal for _, signal, _ in read(request.encode())) == ["custom.value", "gpu.temperature"]


def test_telemetry_of_our_own_agents_is_skipped_and_counted() -> None:
    message = Request(service_name="fleetpulse-agent").gauge("m", 1.0).encode()
    assert read(message) == {}
    assert dropped(message) == {"own": 1}


def test_a_very_long_series_name_ends_with_a_hash() -> None:
    one = read(Request().gauge("m", 1.0, k="x" * 500).encode())
    two = read(Request().gauge("m", 1.0, k="x" * 499 + "y").encode())
    assert len(next(iter(one))[0]) <= 256
    assert one.keys() != two.keys()


@pytest.mark.parametrize("what", ["request", "histogram"])
def test_every_truncation_is_refused_or_read_without_an_error(what: str) -> None:
    request = Request()
    request.scope.metrics.add(name="h").histogram.data_points.add(time_unix_nano=T0_NS, count=4, sum=10.0, min=1.0)
    message = gpu_request() if what == "request" else request.encode()
    one = decoder()
    for length in range(1, len(message)):
        with pytest.raises(WireError):
            read(message[:length], one)


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_do_more_than_be_refused(message: bytes) -> None:
    with contextlib.suppress(WireError):
        read(message)


DECODER = decoder()
MESSAGE = gpu_request()


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(MESSAGE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_are_refused_or_read_and_never_an_error(changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(MESSAGE)
    for at, byte in changes:
        damaged[at] = byte
    try:
        found = read(bytes(damaged), DECODER)
    except WireError:
        return
    assert len(found) <= 6


def read_or_refuse(message: bytes, using: OtlpDecoder) -> Row | str:
    """The values of a message, or the reason why it is refused."""
    try:
        return read(message, using)
    except WireError as error:
        return str(error)


def with_summary() -> bytes:
    request = Request().gauge("a", 1.0)
    request.scope.metrics.add(name="s").summary.data_points.add(time_unix_nano=T0_NS, count=7, sum=14.0)
    return request.encode()


KINDS = {
    "gauges and counters": MESSAGE,
    "two resources": Request().sum("a", 1, slot="x").sum("a", 2, slot="y").node("n2").gauge("b", 3.0).encode(),
    "a summary beside a gauge": with_summary(),
}


@pytest.mark.parametrize("what", KINDS)
@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_a_message_that_repeats_a_known_one_is_read_as_if_it_was_walked(what: str, data: st.DataObject) -> None:
    """Whatever bytes differ: a message is compared with the one before, whose places of times and values are known."""
    known, using, walking = KINDS[what], decoder(), decoder()
    setattr(walking._repeats, "find", lambda *_: None)  # noqa: B010 - mypy refuses to replace a method
    for _ in range(3):
        assert read(known, using) == read(known, walking)
    for _ in range(2):
        changes = data.draw(st.lists(st.tuples(st.integers(0, len(known) - 1), st.integers(0, 255)), max_size=3))
        changed = bytearray(known)
        for at, byte in changes:
            changed[at] = byte
        # as text, in which not a number equals itself
        assert repr(read_or_refuse(bytes(changed), using)) == repr(read_or_refuse(bytes(changed), walking))
    assert read(known, using) == read(known, walking)


def test_a_message_that_repeats_another_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    using, later = decoder(), gpu_request(time=T0_NS + 5_000_000_000, first=50.0)
    for _ in range(2):
        read(gpu_request(), using)
    monkeypatch.setattr(using, "_walker", None)
    assert read(later, using) == read(later)


def test_messages_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MOST_BYTES", 5_000)
    kept = RepeatedMessages()
    walk = Walker().walk
    for _ in range(2):
        for n in range(10):
            message = gpu_request(f"n{n}")
            for _ in range(2):
                kept.keep(message, "", walk(message), ())
            assert kept.find(message, "") is not None
            assert sum(repeats._size_of(*entry) for entry in kept._kept.items()) == kept._size <= 5_000
    assert kept.find(gpu_request("n0"), "") is None


@pytest.mark.parametrize(
    "message",
    [
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # a length of 2^63 - 1
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a length of 2^64 - 1
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",  # an endless number
        b"\x0b",  # a group
        b"\x02\x00",  # field 0
        b"\x0a\x05\x12\x03\x12\x01\x0a",  # a nested message that ends within its tag
    ],
)
def test_hostile_lengths_are_refused(message: bytes) -> None:
    with pytest.raises(WireError, match="malformed at byte"):
        read(message)


def test_a_flood_of_empty_points_is_refused_within_bounds() -> None:
    points = b"\x0a\x00" * (1_100_000)
    gauge = b"\x2a" + _varint(len(points)) + points
    metric = b"\x12" + _varint(len(gauge) + 3) + b"\x0a\x01m" + gauge
    scope = b"\x12" + _varint(len(metric)) + metric
    with pytest.raises(WireError, match="at most 1048576 values"):
        read(b"\x0a" + _varint(len(scope)) + scope)


def test_many_different_times_are_rows_of_their_own_and_cost_no_more() -> None:
    request = Request()
    for i in range(MAX_JOINED + 100):
        request.gauge("m", float(i), T0_NS + 2_000_000_000 * i)
    assert len(read(request.encode())) == MAX_JOINED + 100
    wild = Request().gauge("a", 1.0, (1 << 64) - 1).gauge("b", 2.0, 0).gauge("c", 3.0, 1 << 63)
    assert len(read(wild.encode())) == 3


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


VALUES = st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False, allow_infinity=False))
LABELS = st.dictionaries(st.sampled_from(["a", "b", "gpu"]), st.text(min_size=1, max_size=5), max_size=2)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["m", "q", "r.s"]), LABELS, VALUES), min_size=1, max_size=12, unique_by=repr))
def test_what_opentelemetrys_encoder_writes_is_read_back(points: list[tuple[str, dict[str, str], Any]]) -> None:
    series = {(name, tuple(sorted(labels.items()))): value for name, labels, value in points}
    request = Request()
    for (name, labels), value in series.items():
        request.gauge(name, value, **dict(labels))
    assert sorted(read(request.encode(), DECODER).values()) == sorted(map(float, series.values()))


def test_a_real_collectors_host_metrics_become_signals_of_its_node() -> None:
    """Golden bytes: OpenTelemetry Collector 0.165, hostmetrics receiver, one resource per scraper."""
    found = read((Path(__file__).parent / "golden" / "otlp_collector_0_165.bin").read_bytes())
    named = {(entity, signal): value for (entity, signal, _), value in found.items()}
    assert named["node:collected-1", "node.cpu_idle_time"] == 28_961_770
    assert named["node:collected-1", "node.cpu_count"] == 2
    assert named["port:collected-1.eth0", "nic.rx_bytes"] == 7_541_303_248
    assert named["disk:collected-1.vda", "disk.read"] == 49_170_211_840
    assert named["filesystem:collected-1./", "filesystem.used"] == 41_869_996_032
    assert named["custom:collected-1.system.memory.usage{state=used}", "custom.value"] == 5_636_919_296
    assert not any(entity == "port:collected-1.lo" for entity, _ in named)
