"""The counters of an RDMA port: file, signal, how often, and how wide they are. One line per counter.

Widths: `counters/` as in the kernel's drivers/infiniband/core/sysfs.c (PORT_PMA_ATTR), which follow PortCounters of the
IBTA specification (16.1.3.5) and stop at their highest value; traffic is 64 bits wide (PortCountersExtended).
`hw_counters/` of mlx5: 32 bits where the firmware's queue counters are (mlx5_ifc.h: query_q_counter_out), which wrap;
64 bits where they are those of congestion control and of the port.

Counters that stand at their ceiling, wrapped or began anew: told by the width that the source gives them.

Classic InfiniBand counters do not wrap but stop at their highest value (IBTA specification 16.1.3.5): who looks at
differences alone is blind from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.model.records import Event


@dataclass(frozen=True, slots=True)
class PortCounter:
    """One file. scale: the catalogue's unit is so many times the file's. saturates: it stops at its ceiling."""

    file: str
    signal: str
    every: float
    bits: int = 64
    saturates: bool = False
    scale: int = 1


def _classic(file: str, signal: str, bits: int, every: float = 5.0) -> PortCounter:
    return PortCounter(f"counters/{file}", f"nic.{signal}", every, bits, saturates=True)


def _queue(file: str, every: float, signal: str = "") -> PortCounter:
    return PortCounter(f"hw_counters/{file}", f"nic.{signal or file}", every, 32)


def _wide(file: str, every: float, signal: str = "") -> PortCounter:
    return PortCounter(f"hw_counters/{file}", f"nic.{signal or file}", every)


COUNTERS: tuple[PortCounter, ...] = (
    # the data counters count words of 4 bytes (IBTA 16.1.4.1)
    PortCounter("counters/port_rcv_data", "nic.rx_bytes", 1.0, scale=4),
    PortCounter("counters/port_xmit_data", "nic.tx_bytes", 1.0, scale=4),
    PortCounter("counters/port_rcv_packets", "nic.rx_packets", 5.0),
    PortCounter("counters/port_xmit_packets", "nic.tx_packets", 5.0),
    _classic("symbol_error", "symbol_errors", 16),
    _classic("link_error_recovery", "link_recoveries", 8),
    _classic("link_downed", "link_downs", 8),
    _classic("local_link_integrity_errors", "integrity_errors", 4),
    _classic("excessive_buffer_overrun_errors", "buffer_overruns", 4),
    _classic("port_rcv_errors", "port_rx_errors", 16),
    _classic("port_rcv_remote_physical_errors", "remote_physical_errors", 16),
    _classic("port_rcv_switch_relay_errors", "switch_relay_errors", 16),
    _classic("port_xmit_discards", "port_tx_discards", 16),
    _classic("VL15_dropped", "vl15_dropped", 16),
    _classic("port_xmit_wait", "port_tx_wait", 32),
    _classic("port_rcv_constraint_errors", "rx_constraint_errors", 8, 60.0),
    _classic("port_xmit_constraint_errors", "tx_constraint_errors", 8, 60.0),
    _queue("local_ack_timeout_err", 5.0, "ack_timeouts"),
    _queue("packet_seq_err", 5.0, "sequence_errors"),
    _queue("out_of_sequence", 5.0),
    _queue("implied_nak_seq_err", 5.0, "implied_naks"),
    _queue("rnr_nak_retry_err", 5.0, "rnr_retry_errors"),
    _queue("req_transport_retries_exceeded", 5.0, "transport_retries_exceeded"),
    _queue("roce_adp_retrans", 5.0),
    _queue("roce_adp_retrans_to", 5.0, "roce_adp_retrans_timeouts"),
    _queue("roce_slow_restart", 5.0),
    _queue("roce_slow_restart_cnps", 5.0),
    _queue("roce_slow_restart_trans", 5.0),
    _wide("np_cnp_sent", 5.0, "cnp_sent"),
    _wide("rp_cnp_handled", 5.0, "cnp_handled"),
    _wide("rp_cnp_ignored", 5.0, "cnp_ignored"),
    _wide("np_ecn_marked_roce_packets", 5.0, "ecn_marked"),
    _queue("req_cqe_error", 10.0, "req_cqe_errors"),
    _queue("resp_cqe_error", 10.0, "resp_cqe_errors"),
    _queue("req_cqe_flush_error", 10.0, "req_cqe_flush_errors"),
    _queue("resp_cqe_flush_error", 10.0, "resp_cqe_flush_errors"),
    _queue("req_remote_access_errors", 10.0),
    _queue("resp_remote_access_errors", 10.0),
    _queue("out_of_buffer", 10.0),
    _queue("duplicate_request", 10.0, "duplicate_requests"),
    _wide("rx_icrc_encapsulated", 30.0, "icrc_errors"),
)


Turn = Literal["", "saturated", "wrapped", "reset"]


def turn(before: int, now: int, bits: int, saturates: bool) -> Turn:
    """What happened to a counter of `bits` between two looks.

    saturated: it stands at its ceiling. wrapped: it fell from the top tenth of its range to the lowest, and is one that
    does not saturate (agents/node/counter_generations.py draws the line there too). reset: it went back otherwise.
    """
    ceiling = (1 << bits) - 1
    if now == before == ceiling and saturates:
        return "saturated"
    if now >= before:
        return ""
    return "wrapped" if not saturates and now < 0.1 * ceiling and 0.9 * ceiling < before <= ceiling else "reset"


class Ceilings:
    """Remembers the last value of each counter; tells of each ceiling once, and of each wrap."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], int] = {}
        self._told: set[tuple[str, str]] = set()

    def look(self, time: int, entity: str, counter: PortCounter, value: int) -> Event | None:
        """The event, if there is one to send. value: raw, as the device counts."""
        signal, bits = counter.signal, counter.bits
        key = (entity, signal)
        before = self._last.get(key)
        self._last[key] = value
        if before is None:
            return None
        found = turn(before, value, bits, counter.saturates)
        if found == "saturated" and key not in self._told:
            self._told.add(key)
            return Event(time, entity, "counter_saturated", {"signal": signal, "value": value, "bits": bits})
        if found == "wrapped":
            return Event(time, entity, "counter_wrapped", {"signal": signal, "before": before, "bits": bits})
        if found == "reset":
            self._told.discard(key)
        return None

    def forget(self, entity: str) -> None:
        """Lets go of a port that was taken out."""
        self._last = {key: value for key, value in self._last.items() if key[0] != entity}
        self._told = {key for key in self._told if key[0] != entity}
