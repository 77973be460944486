"""The quality of the data: silent and failing sources, detectors that these disable, lost, late or rejected data."""
