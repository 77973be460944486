"""What detectors share: the kernel, cohorts, gates, evidence, conditions, and what thresholds cost."""
