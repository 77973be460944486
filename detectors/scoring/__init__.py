"""What `fleetpulse score` is made of: inputs, alerts, matching, records of the results, figures, table."""
