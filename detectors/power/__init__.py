"""Power: supplies, feeds, brakes."""
