"""What `fleetpulse score` is made of: inputs, alerts, matching, records of what came of each, figures, table."""
