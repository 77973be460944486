"""Component: lateness of ranks over time."""
