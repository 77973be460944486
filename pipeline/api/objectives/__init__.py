"""Objectives, losses, energy, failure rates and the RMA packet over HTTP."""
