"""The generic detector: signals of which nobody knows what they mean."""
