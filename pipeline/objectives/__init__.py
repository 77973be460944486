"""Objectives: error budgets of a fleet, a tenant or a job, losses by cause, and failure rates of parts."""
