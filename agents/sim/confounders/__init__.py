"""Benign events that look like faults: a page on them is false."""

from agents.sim.confounders.jobs import Evaluation, JobRestart, LossSpike, StageImbalance
from agents.sim.confounders.network import CounterOddity, EcmpCollision
from agents.sim.confounders.nodes import LateTelemetry, Maintenance, MixedSilicon, NodeTransient, OwnCanary
from agents.sim.confounders.plant import InletRise, PowerCap, SensorOffset, SetpointShift
from agents.sim.faults.kind import Kind

CONFOUNDERS: tuple[type[Kind], ...] = (
    SetpointShift,
    PowerCap,
    InletRise,
    SensorOffset,
    JobRestart,
    Evaluation,
    StageImbalance,
    NodeTransient,
    MixedSilicon,
    Maintenance,
    LateTelemetry,
    LossSpike,
    OwnCanary,
    CounterOddity,
    EcmpCollision,
)
