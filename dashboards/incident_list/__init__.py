"""Incidents as a list of links."""
