"""Between the store and the detectors, and between the detectors and the Desk."""
