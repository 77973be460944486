"""Counters of an RDMA port: file, signal, interval and width, and the detection of saturated and wrapped counters.

Widths: `counters/` as in the kernel's drivers/infiniband/core/sysfs.c (PORT_PMA_ATTR), which follow PortCounters of the
IBTA specification (16.1.3.5) and stop at their maximum; traffic is 64 bits wide (PortCountersExtended). `hw_counters/`
of mlx5: 32 bits for the firmware's queue counters (mlx5_ifc.h: query_q_counter_out), which wrap; 64 bits for those of
congestion control and of the port.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.model.records import Event


@dataclass(frozen=True, slots=True)
class PortCounter:
    """One file. scale: factor to the catalogue's unit. saturates: it stops at its maximum."""

    file: str
    signal: str
    interval: float
    bits: int = 64
    saturates: bool = False
    scale: int = 1


def _classic_counter(file: str, signal: str, bits: int, every: float = 5.0) -> PortCounter:
    return PortCounter(f"counters/{file}", f"nic.{signal}", every, bits, saturates=True)


def _queue_counter(file: str, every: float, signal: str = "") -> PortCounter:
    return PortCounter(f"hw_counters/{file}", f"nic.{signal or file}", every, 32)


def _wide_counter(file: str, every: float, signal: str = "") -> PortCounter:
    return PortCounter(f"hw_counters/{file}", f"nic.{signal or file}", every)


RDMA_COUNTERS: tuple[PortCounter, ...] = (
    # the data counters count words of 4 bytes (IBTA 16.1.4.1)
    PortCounter("counters/port_rcv_data", "nic.rx_bytes", 1.0, scale=4),
    PortCounter("counters/port_xmit_data", "nic.tx_bytes", 1.0, scale=4),
    PortCounter("counters/port_rcv_packets", "nic.rx_packets", 5.0),
    PortCounter("counters/port_xmit_packets", "nic.tx_packets", 5.0),
    _classic_counter("symbol_error", "symbol_errors", 16),
    _classic_counter("link_error_recovery", "link_recoveries", 8),
    _classic_counter("link_downed", "link_downs", 8),
    _classic_counter("local_link_integrity_errors", "integrity_errors", 4),
    _classic_counter("excessive_buffer_overrun_errors", "buffer_overruns", 4),
    _classic_counter("port_rcv_errors", "port_rx_errors", 16),
    _classic_counter("port_rcv_remote_physical_errors", "remote_physical_errors", 16),
    _classic_counter("port_rcv_switch_relay_errors", "switch_relay_errors", 16),
    _classic_counter("port_xmit_discards", "port_tx_discards", 16),
    _classic_counter("VL15_dropped", "vl15_dropped", 16),
    _classic_counter("port_xmit_wait", "port_tx_wait", 32),
    _classic_counter("port_rcv_constraint_errors", "rx_constraint_errors", 8, 60.0),
    _classic_counter("port_xmit_constraint_errors", "tx_constraint_errors", 8, 60.0),
    _queue_counter("local_ack_timeout_err", 5.0, "ack_timeouts"),
    _queue_counter("packet_seq_err", 5.0, "sequence_errors"),
    _queue_counter("out_of_sequence", 5.0),
    _queue_counter("implied_nak_seq_err", 5.0, "implied_naks"),
    _queue_counter("rnr_nak_retry_err", 5.0, "rnr_retry_errors"),
    _queue_counter("req_transport_retries_exceeded", 5.0, "transport_retries_exceeded"),
    _queue_counter("roce_adp_retrans", 5.0),
    _queue_counter("roce_adp_retrans_to", 5.0, "roce_adp_retrans_timeouts"),
    _queue_counter("roce_slow_restart", 5.0),
    _queue_counter("roce_slow_restart_cnps", 5.0),
    _queue_counter("roce_slow_restart_trans", 5.0),
    _wide_counter("np_cnp_sent", 5.0, "cnp_sent"),
    _wide_counter("rp_cnp_handled", 5.0, "cnp_handled"),
    _wide_counter("rp_cnp_ignored", 5.0, "cnp_ignored"),
    _wide_counter("np_ecn_marked_roce_packets", 5.0, "ecn_marked"),
    _queue_counter("req_cqe_error", 10.0, "req_cqe_errors"),
    _queue_counter("resp_cqe_error", 10.0, "resp_cqe_errors"),
    _queue_counter("req_cqe_flush_error", 10.0, "req_cqe_flush_errors"),
    _queue_counter("resp_cqe_flush_error", 10.0, "resp_cqe_flush_errors"),
    _queue_counter("req_remote_access_errors", 10.0),
    _queue_counter("resp_remote_access_errors", 10.0),
    _queue_counter("out_of_buffer", 10.0),
    _queue_counter("duplicate_request", 10.0, "duplicate_requests"),
    _wide_counter("rx_icrc_encapsulated", 30.0, "icrc_errors"),
)


CounterChange = Literal["", "saturated", "wrapped", "reset"]


def classify_change(before: int, now: int, bits: int, saturates: bool) -> CounterChange:
    """Returns what happened to a counter of `bits` between two reads.

    saturated: it is at its maximum. wrapped: it does not saturate and fell from the top tenth of its range to the
    lowest (agents/node/counter_generations.py uses the same limit). reset: it decreased otherwise.
    """
    ceiling = (1 << bits) - 1
    if now == before == ceiling and saturates:
        return "saturated"
    if now >= before:
        return ""
    return "wrapped" if not saturates and now < 0.1 * ceiling and 0.9 * ceiling < before <= ceiling else "reset"


class CounterLimitWatch:
    """Keeps the last value of each counter. Reports each saturation once, and each wrap.

    A saturated counter hides further errors from everything that evaluates differences.
    """

    def __init__(self) -> None:
        self._last_values: dict[tuple[str, str], int] = {}
        self._reported: set[tuple[str, str]] = set()

    def check(self, time: int, entity: str, counter: PortCounter, value: int) -> Event | None:
        """Returns the event to send, if any. value: raw, as the device counts."""
        signal, bits = counter.signal, counter.bits
        key = (entity, signal)
        before = self._last_values.get(key)
        self._last_values[key] = value
        if before is None:
            return None
        found = classify_change(before, value, bits, counter.saturates)
        if found == "saturated" and key not in self._reported:
            self._reported.add(key)
            return Event(time, entity, "counter_saturated", {"signal": signal, "value": value, "bits": bits})
        if found == "wrapped":
            return Event(time, entity, "counter_wrapped", {"signal": signal, "before": before, "bits": bits})
        if found == "reset":
            self._reported.discard(key)
        return None

    def drop_port(self, entity: str) -> None:
        """Drops a removed port."""
        self._last_values = {key: value for key, value in self._last_values.items() if key[0] != entity}
        self._reported = {key for key in self._reported if key[0] != entity}
