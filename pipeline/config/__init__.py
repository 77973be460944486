"""The configuration file: its sections and how their values are checked."""
