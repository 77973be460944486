"""Kinds of faults, by the part that breaks."""

from agents.sim.faults.cooling import CoolantLeak, CoolantLoss, FacilityWater, Recirculation
from agents.sim.faults.corruption import SilentDataCorruption
from agents.sim.faults.gpu import GpuEngineFault, GpuOffBus, GspTimeout
from agents.sim.faults.host import HostContention, HostFault
from agents.sim.faults.job import DataStall, JobHang
from agents.sim.faults.kind import Kind
from agents.sim.faults.leaf import Congestion, GrayLeaf, LeafCrash
from agents.sim.faults.link import LinkDegradation, LinkDown, LinkFlap, NicStall
from agents.sim.faults.memory import HbmContained, HbmCorrectedBurst, HbmUncontained, RemapFailure, SramEcc
from agents.sim.faults.nvlink import NvlinkError
from agents.sim.faults.optic import OpticDegradation
from agents.sim.faults.power import PduTrip, PsuLoss
from agents.sim.faults.restriction import NodeRestriction
from agents.sim.faults.slow import ClockStuck, ColdPlate, PcieDowngrade, Straggler
from agents.sim.faults.telemetry import SensorFault, TelemetryGap

FAULTS: tuple[type[Kind], ...] = (
    GpuOffBus,
    GpuEngineFault,
    HbmCorrectedBurst,
    HbmContained,
    HbmUncontained,
    RemapFailure,
    SramEcc,
    GspTimeout,
    SilentDataCorruption,
    ColdPlate,
    ClockStuck,
    PcieDowngrade,
    LinkDegradation,
    NvlinkError,
    OpticDegradation,
    LinkDown,
    LinkFlap,
    LeafCrash,
    GrayLeaf,
    NicStall,
    Congestion,
    Straggler,
    CoolantLoss,
    TelemetryGap,
    PsuLoss,
    PduTrip,
    FacilityWater,
    NodeRestriction,
    CoolantLeak,
    Recirculation,
    SensorFault,
    HostContention,
    HostFault,
    JobHang,
    DataStall,
)
