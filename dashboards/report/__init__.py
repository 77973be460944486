"""The fleet on paper: a printable report, and the map as a picture."""
