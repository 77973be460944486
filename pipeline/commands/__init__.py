"""The commands of `fleetpulse` that belong to the pipeline, and the pipeline process itself."""
