"""The engine: stored rows become frames, findings and incidents; and how it continues after a restart."""
