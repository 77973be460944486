"""Signals of the class neuroncore: one NeuronCore of an AWS Trainium or Inferentia device. One line per signal."""

from __future__ import annotations

from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("neuroncore.utilization", "1", "gauge", "neuroncore", "f4", "Share of the last period in which the core worked; 0 where no program holds it", "neuron-monitor neuroncore_counters", "", (0, 1), interval=5),
    Signal("neuroncore.flops", "{operation}/s", "gauge", "neuroncore", "f8", "Floating point operations per second in the last period", "neuron-monitor neuroncore_counters", "", (0, 1e18), interval=5),
    Signal("neuroncore.memory_used", "By", "gauge", "neuroncore", "f8", "Device memory that programs hold for this core", "neuron-monitor memory_used", "", (0, 2e12), interval=5),
)  # fmt: skip
