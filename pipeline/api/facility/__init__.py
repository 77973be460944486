"""Cooling and power: current values of each unit, what it supplies, and when its GPUs throttle."""
