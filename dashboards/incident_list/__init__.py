"""Incidents as a list of links, painted by our own script."""
