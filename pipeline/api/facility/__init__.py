"""Cooling and power: current values of each unit, what hangs on it, and when its GPUs throttle."""
