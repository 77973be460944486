"""Rules for answers: for each kind of fault the least level, the detectors and the kinds of cause, in one table.

Names of detectors that do not exist (yet) are harmless. docs/scoring.md has the same tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.model.records import Level
from pipeline.model.topology import kind_of


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """The least level, and the detectors and kinds of cause that are an answer; None: any."""

    level: Level
    detectors: frozenset[str] | None
    causes: frozenset[str] | None


def _rule(level: Level, detectors: str, causes: str) -> AnswerRule:
    return AnswerRule(level, frozenset(detectors.split()), frozenset(causes.split()))


_BLIND = "telemetry telemetry_blind"
_SENSOR = f"{_BLIND} telemetry_sensor"
_HEAT = "thermal thermal_edge"
_LOOP = "coolant coolant_edge"
_LINK = "link link_stall"
_GRAY = f"{_LINK} link_congestion straggler_inferred straggler_job"
_SLOW = "straggler straggler_inferred"
ANSWER_RULES: Mapping[str, AnswerRule] = {
    # GPU and memory. Ticket where NVIDIA's catalogue of XIDs has "ignore" or "restart app" (13, 31, 63, 94), page
    # where it has reset or reboot (48 of SRAM, 64, 79, 95, 119).
    "gpu_off_bus": _rule("page", f"xid {_BLIND}", "gpu node"),
    "gpu_engine_fault": _rule("ticket", "xid", "gpu node rank job"),
    "hbm_ce_burst": _rule("ticket", "memory xid", "gpu node"),
    "hbm_ue_contained": _rule("ticket", "memory xid", "gpu node"),
    "hbm_ue_uncontained": _rule("page", "memory xid", "gpu node"),
    "remap_failure": _rule("page", "memory xid", "gpu node"),
    "sram_ecc": _rule("page", "memory xid", "gpu node"),
    "gsp_timeout": _rule("page", f"xid {_BLIND}", "gpu node"),
    "sdc": _rule("page", "sdc sdc_replica", "gpu node"),
    # slow devices; the acute straggler is slowed by heat, so a finding of the heat is right too
    "straggler": _rule("page", f"{_SLOW} {_HEAT}", "rank gpu node"),
    "cold_plate": _rule("ticket", f"{_SLOW} {_HEAT}", "rank gpu node"),
    "clock_stuck": _rule("page", _SLOW, "rank gpu node"),
    "slow_return": _rule("page", _SLOW, "rank gpu node"),
    "memory_heat": _rule("ticket", f"{_HEAT} memory", "gpu node"),
    "pcie_downgrade": _rule("page", f"link_pcie {_SLOW} xid", "port rank gpu node"),
    # links and switches
    "nvlink_error": _rule("page", f"link_nvlink xid {_SLOW}", "port nvlink nvswitch gpu node rack"),
    "link_degradation": _rule("page", "link", "port node leaf rail"),
    "optic_degradation": _rule("ticket", "link link_optic", "port node leaf rail"),
    "link_down": _rule("page", "link", "port node leaf rail"),
    "link_flap": _rule("page", "link", "port node leaf rail"),
    "leaf_crash": _rule("page", f"link {_BLIND}", "leaf pod fabric"),
    # no port has errors, the switch is at fault: its waiting ports or its slow jobs may be named too
    "gray_leaf": _rule("page", _GRAY, "job stage leaf rail pod fabric"),
    "pause_storm": _rule("ticket", f"{_LINK} link_congestion", "port node"),
    "nic_stall": _rule("page", f"{_LINK} straggler", "port node"),
    # no link fault: the job or the switch is named, never a port
    "congestion": _rule("ticket", "link_congestion straggler_inferred straggler_job", "job stage leaf rail pod fabric"),
    # hosts
    "host_contention": _rule("page", f"{_SLOW} straggler_job", "node"),
    "host_fault": _rule("page", f"memory power host_health {_SLOW} xid {_BLIND}", "node"),
    # what runs out can be replaced in time, if its trend is known
    "memory_leak": _rule("ticket", "host_health", "node"),
    "disk_wear": _rule("ticket", "host_health", "disk node"),
    "disk_failing": _rule("ticket", "host_health", "disk node"),
    # power; a lost supply with its spare running can wait until morning, a tripped PDU cannot
    "psu_loss": _rule("ticket", "power", "psu node rack pdu"),
    "pdu_trip": _rule("page", f"power {_BLIND}", "pdu row"),
    # cooling; slow ranks may be the first sign of a warm loop, but the cause must be the loop or its rack
    "coolant": _rule("page", f"{_LOOP} {_HEAT} {_SLOW}", "cdu loop rack"),
    "facility_water": _rule("page", f"{_LOOP} {_HEAT}", "cdu loop hall facility"),
    # of one node: its rack's manifold is right too, the whole loop is not
    "node_restriction": _rule("page", f"{_LOOP} {_HEAT} {_SLOW}", "node rack"),
    "coolant_leak": _rule("page", f"coolant_leak {_LOOP}", "leak_detector rack cdu loop"),
    "recirculation": _rule("ticket", f"{_HEAT} thermal_inlet", "rack row hall"),
    "hall_air": _rule("ticket", f"{_HEAT} thermal_inlet", "rack row hall site"),
    # the instrument is at fault: only telemetry health answers, a thermal page is false
    "sensor_fault": _rule("ticket", _SENSOR, "sensor gpu rank node port psu pdu cdu loop rack"),
    "telemetry_gap": _rule("ticket", f"{_BLIND} telemetry_site", "gpu node rack site"),
    # caused by the job
    "job_hang": _rule("page", "straggler_job", "job"),
    "data_stall": _rule("ticket", "straggler_job straggler_inferred", "job"),
    "slow_collectives": _rule("page", "straggler_job straggler_inferred link_congestion", "job stage"),
}
SOFT_RULES: Mapping[str, AnswerRule] = {
    # without a wrong digest only training shows it: no proof, so a ticket to test the GPU
    "sdc": _rule("ticket", "sdc sdc_replica sdc_gradient", "gpu node"),
    # warm GPUs that do not throttle slow no job: that waits for office hours, as cold plates do
    "node_restriction": _rule("ticket", f"{_LOOP} {_HEAT} {_SLOW}", "node rack"),
    "facility_water": _rule("ticket", f"{_LOOP} {_HEAT}", "cdu loop hall facility"),
    # no job is slowed by a tenth: the GPU is reset when its job ends
    "clock_stuck": _rule("ticket", _SLOW, "rank gpu node"),
    # no job is slowed by a tenth for long: the switch is drained when its jobs end
    "gray_leaf": _rule("ticket", _GRAY, "job stage leaf rail pod fabric"),
    # no rope is wet and the reservoir lasts for a day: it is filled up, and the leak is searched in office hours
    "coolant_leak": _rule("ticket", f"coolant_leak {_LOOP}", "leak_detector rack cdu loop"),
    # a job of one node
    "job_hang": _rule("ticket", "straggler_job", "job"),
    # no job ran on it, so no work is lost
    "host_fault": _rule("ticket", f"memory power host_health {_SLOW} xid {_BLIND}", "node"),
    # of a port or a GPU that no job uses: it is repaired before the next job needs it
    "link_degradation": _rule("ticket", "link", "port node leaf rail"),
    "link_down": _rule("ticket", "link", "port node leaf rail"),
    "link_flap": _rule("ticket", "link", "port node leaf rail"),
    "nic_stall": _rule("ticket", f"{_LINK} straggler", "port node"),
    "pcie_downgrade": _rule("ticket", f"link_pcie {_SLOW} xid", "port rank gpu node"),
}
"""Rules instead of ANSWER_RULES where an event is `soft`; otherwise its kind is a logged fact."""
ANY_PAGE = AnswerRule("page", None, None)
"""Rule of a kind that is not in ANSWER_RULES, so that own labels can be scored: any page on the root or an ancestor."""

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
"""Hold of a statistical page: benign slowdowns last 30 to 300 s, twice the longest. Chosen."""
GOAL_S = 1020.0
"""Goal for the page of a soft event, 17 min from its onset. Recall counts soft events of at least HOLD_S plus the
median delay of their kind, at most this: else late findings would remove events that were found. Chosen."""

_CLASS_OF_ATTRIBUTION = {
    **dict.fromkeys(("gpu", "memory", "node", "host"), "NODE"),
    "job": "JOB",
    "network": "NETWORK",
    "cooling": "COOLING",
    "power": "POWER",
    "sdc": "SDC",
    **dict.fromkeys(("instrument", "telemetry"), "TELEMETRY"),
}
"""`parameters.attribution` of the truth -> row of the confusion matrix."""
BY_FAMILY = {
    "link": "NETWORK",
    "link_nvlink": "NODE",
    "link_pcie": "NODE",
    "sdc": "SDC",
    "memory": "NODE",
    "xid": "NODE",
    "host": "NODE",
    "power": "POWER",
    "coolant": "COOLING",
    "telemetry": "TELEMETRY",
}
"""Class of a detector's alerts whatever their cause: by its whole name, or by its family, the name up to the first
underscore. PCIe and NVLink are parts of a node: a technician must go there."""
BY_CAUSE = {
    **dict.fromkeys(("rank", "gpu", "node"), "NODE"),
    **dict.fromkeys(("job", "stage"), "JOB"),
    **dict.fromkeys(("port", "leaf", "rail", "pod", "fabric"), "NETWORK"),
    **dict.fromkeys(("cdu", "loop", "rack", "row", "hall", "facility"), "COOLING"),
    **dict.fromkeys(("psu", "pdu"), "POWER"),
}
"""Class of the alerts of all other detectors (straggler, thermal), by the kind of their cause."""
CLASSES = ("NODE", "JOB", "NETWORK", "COOLING", "POWER", "SDC", "TELEMETRY", "OTHER")
NOT_FOUND = "not found"


def fault_class(attribution: str | None) -> str:
    """Returns the row of the confusion matrix for an attribution in the truth."""
    return _CLASS_OF_ATTRIBUTION.get(attribution or "", "OTHER")


def alert_class(detector: str, cause: str, paged: bool = False) -> str:
    """Returns the column of the confusion matrix for an alert. Silence that a feed explains is a fault of power, and a
    page on silence is about what died, not about its telemetry."""
    family, by_cause = detector.split("_", 1)[0], BY_CAUSE.get(kind_of(cause), "OTHER")
    if family == "telemetry" and (by_cause == "POWER" or (paged and by_cause in ("NODE", "NETWORK"))):
        return by_cause
    return BY_FAMILY.get(detector) or BY_FAMILY.get(family) or by_cause
