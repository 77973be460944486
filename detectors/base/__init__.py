"""What all detectors share: the Detector class, state, cohorts, streams, findings, false alarm budgets."""
