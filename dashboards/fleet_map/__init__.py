"""The fleet as a map: one cell per node, grouped by rack, painted on a canvas by our own script."""
