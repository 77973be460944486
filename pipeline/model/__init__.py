"""What flows through Fleetpulse and what it is about: records, signals, event kinds, topology, errors."""
