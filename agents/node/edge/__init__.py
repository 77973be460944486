"""Edge rules: urgent events derived on the node from each tick's readings, and sent ahead of its telemetry."""
