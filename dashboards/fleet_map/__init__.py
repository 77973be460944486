"""The fleet as a map: one cell per node, grouped by rack, drawn on a canvas."""
