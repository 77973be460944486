"""What the answers of AMD's `amdsmi` binding mean in the catalogue's names and units.

Shapes and units as in ROCm's amdsmi documentation, 6.0 to 7.0; "N/A", absent and out of range all count as missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agents.sources.accelerators.columns import number, scaled, text, total, whole

MIB = 1024 * 1024
KIB = 1024
"""XGMI counters are in kilobytes of 1,024 (amdsmi.h, xgmi_read_data_acc)."""
_WATTS_AT_MOST = 100_000
"""Above this a power limit is in microwatts, as amdsmi_get_power_cap_info has it since ROCm 6; before it gave watts."""
_GENERATIONS = {2_500: 1, 5_000: 2, 8_000: 3, 16_000: 4, 32_000: 5, 64_000: 6}
"""MT/s of a lane -> PCIe generation."""
POWER_CAP, SOFTWARE_THERMAL, HARDWARE_THERMAL = 0x4, 0x20, 0x40
"""Bits of gpu.throttle_reasons, which are NVML's, so that a detector reads every maker alike."""
_BITS: tuple[tuple[range, int], ...] = (
    # bits of indep_throttle_status (Linux, amdgpu_smu.h, SMU_THROTTLER_*_BIT)
    (range(24), POWER_CAP),  # package power and current
    (range(32, 38), SOFTWARE_THERMAL),  # die and memory
    (range(38, 44), SOFTWARE_THERMAL),  # regulators and liquid
    (range(44, 48), HARDWARE_THERMAL),  # VRHOT and PROCHOT lines
)
_LIMITERS = {
    "gpu.limiter_ticks": "accumulation_counter",
    "gpu.limiter_power": "ppt_residency_acc",
    "gpu.limiter_thermal": "socket_thm_residency_acc",
    "gpu.limiter_memory_thermal": "hbm_thm_residency_acc",
    "gpu.limiter_regulator_thermal": "vr_thm_residency_acc",
    "gpu.limiter_prochot": "prochot_residency_acc",
}
_PENDING, _UNRESERVABLE = 1, 2
"""AmdSmiMemoryPageStatus."""


def activity(answer: Mapping[str, Any]) -> dict[str, object]:
    """amdsmi_get_gpu_activity: percent."""
    return {
        "gpu.utilization": scaled(answer.get("gfx_activity"), 0.01),
        "gpu.memory_utilization": scaled(answer.get("umc_activity"), 0.01),
    }


def power(answer: Mapping[str, Any]) -> dict[str, object]:
    """amdsmi_get_power_info: W; the MI300 tells the current power, older ones the average, newer libraries either."""
    names = ("current_socket_power", "average_socket_power", "socket_power")
    return {"gpu.power": next((w for name in names if 0 < (w := number(answer.get(name))) < 65_535), None)}


def power_cap(answer: Mapping[str, Any]) -> dict[str, object]:
    """amdsmi_get_power_cap_info."""
    names = {"": "power_cap", "_default": "default_power_cap", "_min": "min_power_cap", "_max": "max_power_cap"}
    return {f"gpu.power_limit{end}": _watts(number(answer.get(name))) for end, name in names.items()}


def energy(answer: Mapping[str, Any]) -> dict[str, object]:
    """amdsmi_get_energy_count: steps of so many microjoules; the accumulator was called `power` before ROCm 6."""
    steps = whole(answer.get("energy_accumulator", answer.get("power")))
    size = number(answer.get("counter_resolution"))
    return {"gpu.energy": int(steps * size / 1000) if steps < 2**63 and 0 < size < 1e6 else None}


def clock(signal: str, answer: Mapping[str, Any]) -> dict[str, object]:
    """amdsmi_get_clock_info: MHz; the clock was called `cur_clk` before ROCm 6."""
    return {signal: answer.get("clk", answer.get("cur_clk")), f"{signal}_max": answer.get("max_clk")}


def memory(answer: Mapping[str, Any]) -> dict[str, object]:
    """amdsmi_get_gpu_vram_usage: MiB."""
    return {f"gpu.memory_{end}": scaled(answer.get(f"vram_{end}"), MIB) for end in ("used", "total")}


def errors(answer: Mapping[str, Any], corrected: str, uncorrected: str, deferred: str = "") -> dict[str, object]:
    """amdsmi_get_gpu_total_ecc_count and amdsmi_get_gpu_ecc_count: since the driver was loaded."""
    found = {corrected: answer.get("correctable_count"), uncorrected: answer.get("uncorrectable_count")}
    return found | ({deferred: answer.get("deferred_count")} if deferred else {})


def celsius(value: object) -> float:
    """amdsmi_get_temp_metric: degrees; ROCm 5 gave thousandths, and no chip is at 1,000 degrees."""
    found = number(value)
    return found / 1000 if abs(found) > 1000 else found


def bad_pages(answer: object) -> dict[str, object]:
    """amdsmi_get_gpu_bad_page_info: a list of records; ROCm 5 and 6.0 say a sentence where there are none."""
    pages = answer if isinstance(answer, list) else []
    found = [whole(page.get("status")) for page in pages if isinstance(page, Mapping)]
    return {
        "gpu.pages_uncorrected": len(found),
        "gpu.pages_pending": int(_PENDING in found),
        "gpu.pages_failed": int(_UNRESERVABLE in found),
    }


def pcie(answer: Mapping[str, Any]) -> dict[str, object]:
    """amdsmi_get_pcie_info: lanes, MT/s, counters since the driver was loaded."""
    now, fixed = _part(answer, "pcie_metric"), _part(answer, "pcie_static")
    return {
        "gpu.pcie_width": now.get("pcie_width"),
        "gpu.pcie_width_max": fixed.get("max_pcie_width"),
        "gpu.pcie_generation": _GENERATIONS.get(whole(now.get("pcie_speed"))),
        "gpu.pcie_generation_max": _GENERATIONS.get(whole(fixed.get("max_pcie_speed"))),
        "gpu.pcie_replays": now.get("pcie_replay_count"),
        "gpu.pcie_replay_rollovers": now.get("pcie_replay_roll_over_count"),
        "gpu.pcie_recoveries": now.get("pcie_l0_to_recovery_count"),
        "gpu.pcie_naks_sent": now.get("pcie_nak_sent_count"),
        "gpu.pcie_naks_received": now.get("pcie_nak_received_count"),
    }


def metrics(answer: Mapping[str, Any]) -> dict[str, object]:
    """amdsmi_get_gpu_metrics_info: the firmware's own table."""
    found: dict[str, object] = {signal: answer.get(name) for signal, name in _LIMITERS.items()}
    regulators = [number(answer.get(f"temperature_{name}")) for name in ("vrgfx", "vrsoc", "vrmem")]
    found["gpu.regulator_temperature"] = max((value for value in regulators if value == value), default=None)
    return found | dict(_throttling(answer)) | dict(_links(answer))


def facts(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes from the answers about chip, board, driver, BIOS and firmware; what says nothing is left out."""
    asic, board = _part(answers, "asic"), _part(answers, "board")
    driver, bios = _part(answers, "driver"), _part(answers, "vbios")
    found = {
        "vendor": "AMD",
        "sku": text(asic.get("market_name")) or text(board.get("product_name")),
        "serial": text(board.get("product_serial")) or text(asic.get("asic_serial")),
        "uuid": text(answers.get("uuid")),
        "pci": text(answers.get("bdf")).lower(),
        "driver": text(driver.get("driver_version")),
        "vbios": text(bios.get("version")),
        "part_number": text(board.get("model_number")) or text(bios.get("part_number")),
        "module_id": text(asic.get("oam_id")),
        "firmware": _firmware(answers.get("firmware")),
    }
    return {key: value for key, value in found.items() if value}


def _part(answer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = answer.get(name)
    return found if isinstance(found, Mapping) else {}


def _watts(value: float) -> float:
    return value * 1e-6 if value > _WATTS_AT_MOST else value


def _throttling(answer: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Some versions of the binding give the mask, some only whether there is any bit."""
    mask, any_bit = answer.get("indep_throttle_status"), answer.get("throttle_status")
    if isinstance(mask, int) and not isinstance(mask, bool) and 0 <= mask < 2**64 - 1:
        bits = [bit for bit in range(64) if mask >> bit & 1]
        reasons = {reason for bit in bits for place, reason in _BITS if bit in place}
        yield "gpu.throttle_reasons", sum(reasons)
        yield "gpu.throttled", int(bool(mask))
    elif isinstance(mask, bool) or isinstance(any_bit, int):
        yield "gpu.throttled", int(bool(mask if isinstance(mask, bool) else any_bit))


def _links(answer: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Links that are not there say "N/A" in their place of the list."""
    status = [value for value in _numbers(answer.get("xgmi_link_status")) if value in (0, 1)]
    if status:
        yield "gpu.links", len(status)
        yield "gpu.links_up", sum(status)
    for signal, name in (("gpu.xgmi_rx_bytes", "xgmi_read_data_acc"), ("gpu.xgmi_tx_bytes", "xgmi_write_data_acc")):
        moved = total(_numbers(answer.get(name)))
        yield signal, None if moved is None else moved * KIB


def _numbers(values: object) -> list[int]:
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        return []
    return [value for value in values if isinstance(value, int) and 0 <= value < 2**64 - 1]


def _firmware(answer: object) -> str:
    """Version of the power management firmware, by which behaviour under load differs."""
    listed = answer.get("fw_list") if isinstance(answer, Mapping) else None
    for one in listed if isinstance(listed, list) else ():
        name = one.get("fw_name") if isinstance(one, Mapping) else None
        if str(getattr(name, "name", name)).endswith(("_PM", "SMC")):
            return text(one.get("fw_version"))
    return ""
