"""The page Facility: cooling and power, what depends on each unit, and when its GPUs throttle."""
