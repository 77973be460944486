"""Objectives: what a fleet, a tenant or a job is promised, what was lost and why, and which parts fail how often."""
