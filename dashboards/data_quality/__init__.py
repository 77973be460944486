"""The page Data quality: which sources are silent or fail, the detectors that this disables, and lost data."""
