"""The generic detector: changes in signals whose meaning is not known."""
