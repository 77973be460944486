"""Acts on machines: hold, release, evict, diagnose, reset, reboot, ticket. Planned, approved, executed, verified."""
