"""What counts as an answer: per kind of fault the least level, the detectors and the kinds of cause, in one table.

Names of detectors that do not exist (yet) are harmless: nobody says them. docs/scoring.md shows the same tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.model.records import Level
from pipeline.model.topology import kind_of


@dataclass(frozen=True, slots=True)
class Counting:
    """The least level, and which detectors and kinds of cause are an answer; None: any."""

    level: Level
    detectors: frozenset[str] | None
    causes: frozenset[str] | None


def _of(level: Level, detectors: str, causes: str) -> Counting:
    return Counting(level, frozenset(detectors.split()), frozenset(causes.split()))


_BLIND = "telemetry telemetry_blind"
_SENSOR = f"{_BLIND} telemetry_sensor"
_HEAT = "thermal thermal_edge"
_LOOP = "coolant coolant_edge"
_LINK = "link link_stall"
_SLOW = "straggler straggler_inferred"
COUNTS: Mapping[str, Counting] = {
    # GPU and memory. Ticket where NVIDIA's catalogue of XIDs says "ignore" or "restart app" (13, 31, 63, 94), page
    # where it says reset or reboot (48 of SRAM, 64, 79, 95, 119).
    "gpu_off_bus": _of("page", f"xid {_BLIND}", "gpu node"),
    "gpu_engine_fault": _of("ticket", "xid", "gpu node rank job"),
    "hbm_ce_burst": _of("ticket", "memory xid", "gpu node"),
    "hbm_ue_contained": _of("ticket", "memory xid", "gpu node"),
    "hbm_ue_uncontained": _of("page", "memory xid", "gpu node"),
    "remap_failure": _of("page", "memory xid", "gpu node"),
    "sram_ecc": _of("page", "memory xid", "gpu node"),
    "gsp_timeout": _of("page", f"xid {_BLIND}", "gpu node"),
    "sdc": _of("page", "sdc sdc_replica", "gpu node"),
    # slow devices; the acute straggler is one slowed by heat, so whoever finds the heat is right too
    "straggler": _of("page", f"{_SLOW} {_HEAT}", "rank gpu node"),
    "cold_plate": _of("ticket", f"{_SLOW} {_HEAT}", "rank gpu node"),
    "clock_stuck": _of("page", _SLOW, "rank gpu node"),
    "pcie_downgrade": _of("page", f"link_pcie {_SLOW} xid", "port rank gpu node"),
    # links and what they hang on
    "nvlink_error": _of("page", f"link_nvlink xid {_SLOW}", "port nvlink nvswitch gpu node rack"),
    "link_degradation": _of("page", "link", "port node leaf rail"),
    "optic_degradation": _of("ticket", "link link_optic", "port node leaf rail"),
    "link_down": _of("page", "link", "port node leaf rail"),
    "link_flap": _of("page", "link", "port node leaf rail"),
    "leaf_crash": _of("page", f"link {_BLIND}", "leaf pod fabric"),
    # no port errs and none is at fault: the switch is; whoever sees its ports wait or its jobs slow names it or them
    "gray_leaf": _of(
        "page", f"{_LINK} link_congestion straggler_inferred straggler_job", "job stage leaf rail pod fabric"
    ),
    "nic_stall": _of("page", f"{_LINK} straggler", "port node"),
    # not a link fault: the job or the switch is named, a port never
    "congestion": _of("ticket", "link_congestion straggler_inferred straggler_job", "job stage leaf rail pod fabric"),
    # hosts
    "host_contention": _of("page", _SLOW, "node"),
    "host_fault": _of("page", f"memory power {_SLOW} xid {_BLIND}", "node"),
    # power; a lost supply with its spare running can wait for the morning, a tripped PDU cannot
    "psu_loss": _of("ticket", "power", "psu node rack pdu"),
    "pdu_trip": _of("page", f"power {_BLIND}", "pdu row"),
    # cooling; slow ranks may be what first shows a warm loop, but then the cause must be the loop or its rack
    "coolant": _of("page", f"{_LOOP} {_HEAT} {_SLOW}", "cdu loop rack"),
    "facility_water": _of("page", f"{_LOOP} {_HEAT}", "cdu loop hall facility"),
    # of one node: who names its rack's manifold is right too, who names the whole loop is not
    "node_restriction": _of("page", f"{_LOOP} {_HEAT} {_SLOW}", "node rack"),
    "coolant_leak": _of("page", f"coolant_leak {_LOOP}", "leak_detector rack cdu loop"),
    "recirculation": _of("ticket", f"{_HEAT} thermal_inlet", "rack row hall"),
    # the instrument is at fault, not what it measures: only telemetry health answers, a thermal page is false
    "sensor_fault": _of("ticket", _SENSOR, "sensor gpu rank node port psu pdu cdu loop rack"),
    "telemetry_gap": _of("ticket", f"{_BLIND} telemetry_site", "gpu node rack site"),
    # made by the job
    "job_hang": _of("page", "straggler_job", "job"),
    "data_stall": _of("ticket", "straggler_job", "job"),
}
SOFT: Mapping[str, Counting] = {
    # without a wrong digest only training shows it: no proof, so nobody is woken; the GPU is to be tested
    "sdc": _of("ticket", "sdc sdc_replica sdc_gradient", "gpu node"),
    # warm GPUs that do not throttle slow nobody: that waits for office hours, as cold plates do
    "node_restriction": _of("ticket", f"{_LOOP} {_HEAT} {_SLOW}", "node rack"),
}
"""What counts instead of COUNTS where an event is `soft`: its kind is a logged fact in others."""
ANY = Counting("page", None, None)
"""Of a kind that is not in COUNTS, so that own labels can be scored: any page on the root or an ancestor."""

DELTA_MIN: Mapping[str, float] = {
    "time": 0.02,  # Llama 3 saw 1 to 2 % of daily change of throughput alone (Dubey et al. 2024, section 3.3.4)
    "clock": 0.03,  # two steps of 15 MHz at 1,000 MHz; chosen
    "bandwidth": 0.10,  # Greyhound's check of a change of the mean (Wu et al. 2024)
    "temperature": 3.0,  # K, three steps of NVML's rounding; chosen
    "resistance": 0.08,  # the least that 1 K of rounding lets through at 40 K over the coolant, threefold; chosen
    "flow": 0.10,  # five times the 2 % error of a flow meter; chosen
    "power": 0.10,  # above the spread of identical GPUs, 8 % (Sinha et al., SC 2022)
    "flaps": 3.0,  # in 12 hours, as gpud counts them
}
"""The least `parameters.effect` that must be found, by `effect_unit`: shares, K, and a number of flaps."""
HOLD_S = 600.0
"""What a statistical page waits for: benign slowdowns last 30 to 300 s, twice the longest. Chosen."""
GOAL_S = 1020.0
"""By when a soft event must be paged, 17 min from its onset. The length that recall asks of soft events is HOLD_S and
the median delay of their kind, but at most this for the delay: else late findings take out what was found. Chosen."""

_FOLDED = {
    **dict.fromkeys(("gpu", "memory", "node", "host"), "NODE"),
    "job": "JOB",
    "network": "NETWORK",
    "cooling": "COOLING",
    "power": "POWER",
    "sdc": "SDC",
    **dict.fromkeys(("instrument", "telemetry"), "TELEMETRY"),
}
"""`parameters.attribution` of the truth -> row of the confusion."""
BY_FAMILY = {
    "link": "NETWORK",
    "link_nvlink": "NODE",
    "link_pcie": "NODE",
    "sdc": "SDC",
    "memory": "NODE",
    "xid": "NODE",
    "power": "POWER",
    "coolant": "COOLING",
    "telemetry": "TELEMETRY",
}
"""What a detector's alert says whatever its cause: by its whole name, or by its family, the name up to the first
underscore. Lanes of PCIe and NVLink are parts of a node: there somebody must go."""
BY_CAUSE = {
    **dict.fromkeys(("rank", "gpu", "node"), "NODE"),
    **dict.fromkeys(("job", "stage"), "JOB"),
    **dict.fromkeys(("port", "leaf", "rail", "pod", "fabric"), "NETWORK"),
    **dict.fromkeys(("cdu", "loop", "rack", "row", "hall", "facility"), "COOLING"),
    **dict.fromkeys(("psu", "pdu"), "POWER"),
}
"""What the alert of any other detector (straggler, thermal) says, by the kind of its cause."""
CLASSES = ("NODE", "JOB", "NETWORK", "COOLING", "POWER", "SDC", "TELEMETRY", "OTHER")
NOT_FOUND = "not found"


def folded(attribution: str | None) -> str:
    """Row of the confusion for what the truth names."""
    return _FOLDED.get(attribution or "", "OTHER")


def says(detector: str, cause: str) -> str:
    """Column of the confusion for what an alert names."""
    family = detector.split("_", 1)[0]
    return BY_FAMILY.get(detector) or BY_FAMILY.get(family) or BY_CAUSE.get(kind_of(cause), "OTHER")
