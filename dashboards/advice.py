"""Recommended actions on the incident page, by detector or family of detectors."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.model.entity_names import entity_name

ACTIONS: Mapping[str, str] = {
    "straggler": (
        "The whole job waits for {entity}. Compare clocks, throttle reasons and temperature with its peers. "
        "If it stays slow, move its rank to a spare node."
    ),
    "straggler_job": (
        "All ranks of {entity} are slow together. Check storage, the data loader, network congestion and recent "
        "changes to the job before you suspect a device."
    ),
    "link": (
        "Inspect both ends of {entity}: reseat and clean first, then replace cable or transceiver. "
        "Until then, every collective over this link can be slow."
    ),
    "link_stall": (
        "{entity} is up, but moves no data. Check the process and the NIC driver on the node, flow control (PFC) on "
        "the switch port, and the other end of the link."
    ),
    "link_optic": (
        "Clean and reseat the transceiver of {entity}. Replace it if optical power, bias current or temperature stay "
        "outside the limits."
    ),
    "link_congestion": (
        "Find the jobs that share {entity}. Check routing, adaptive routing and flow control settings, and receivers "
        "that are slow. The cable is rarely the reason."
    ),
    "link_nvlink": (
        "Stop new jobs on the node. Run the vendor's NVLink diagnostics on {entity}; reset the GPU, and replace GPU or "
        "baseboard if errors return."
    ),
    "link_pcie": (
        "Check the PCIe link of {entity}: width, speed and errors on both ends. Reseat the device or riser when the "
        "node is free; replace it if errors return."
    ),
    "sdc": (
        "Do not trust results of {entity} since the onset. Take it out of new jobs, repeat the check on it and on a "
        "peer, and find the checkpoints that were written since."
    ),
    "sdc_gradient": (
        "Compare loss and gradients of the ranks since the onset, and go back to the last checkpoint before it. "
        "Run the canaries on {entity} before it takes part again."
    ),
    "xid": (
        "Look up the XID in the evidence. Drain the node of {entity}, then reset the GPU or reboot the node as the "
        "XID demands. If it returns after a reset, run the field diagnostics and open a case with the vendor."
    ),
    "memory": (
        "Drain the node of {entity} at the next opportunity and reset it, so that pending row remaps or page offlines "
        "take effect. Replace the part if uncorrectable errors return or remapping fails."
    ),
    "power": (
        "Check power supplies, feeds and power limits of {entity}, and the load of its PDU. "
        "Move jobs away if redundancy is lost."
    ),
    "power_draw": (
        "Compare power limit, clocks and utilization of {entity} with its peers. If power differs at equal load, run "
        "diagnostics and check the voltage regulator and the firmware version."
    ),
    "coolant": (
        "Send a technician to {entity}: check pump, valves and filter. GPUs behind it throttle next. "
        "Move jobs away before they do."
    ),
    "coolant_leak": (
        "Send a technician to {entity} now. Stop the jobs there, close the loop and cut the power as your site's leak "
        "procedure demands. Clear the incident only after an inspection."
    ),
    "thermal": (
        "Check the cooling of {entity}: coolant flow and supply temperature, fans, inlet temperature, cold plate and "
        "thermal paste. If only this device is hot, move its jobs and service it."
    ),
    "thermal_inlet": (
        "Check the room cooling and the air flow at {entity}: blocked inlets, missing blanking panels, failed fans or "
        "air handlers."
    ),
    "telemetry": (
        "Check whether {entity} runs and is reachable. If it runs, check the agent: `systemctl status "
        "fleetpulse-agent` and `fleetpulse doctor` on the node."
    ),
    "telemetry_sensor": (
        "Do not act on the values of this sensor of {entity}. Compare them with the BMC, then reset the BMC or replace "
        "the sensor."
    ),
    "telemetry_clock": (
        "Check time synchronization of {entity}: `timedatectl` and `chronyc sources`. Wrong times shift its data "
        "against all others."
    ),
    "telemetry_blind": (
        "Run `fleetpulse doctor` on {entity}: a collector reads nothing. Check drivers, permissions and versions "
        "after the last upgrade."
    ),
    "telemetry_site": (
        "Check the network to {entity}, the brokers and the last rollout of agents. Faults there are invisible until "
        "data arrives again."
    ),
    "anomaly": (
        "This is an unusual change without a known meaning. Compare {entity} with its peers in the chart and look for "
        "a change at the onset in the timeline. If it is normal, mark it as normal."
    ),
}
"""Detector or family (the name up to the first underscore) -> text; the detector's own entry comes first."""
GENERAL = "Compare {entity} with its peers in the chart, and write a comment with your findings."


def recommended_action(detector: str, entity: str) -> str:
    """Returns what to do next about `entity`, the suspected cause."""
    text = ACTIONS.get(detector) or ACTIONS.get(detector.partition("_")[0], GENERAL)
    return text.format(entity=entity_name(entity))
