"""Canaries: known problems with exact answers, computed on a core or an idle GPU to find silent data corruption."""
