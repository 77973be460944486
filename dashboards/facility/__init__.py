"""The page Facility: cooling and power, what hangs on each unit, and when its GPUs throttle."""
