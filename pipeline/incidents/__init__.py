"""Incidents: findings with one suspected cause, their history, and what people decide about them."""
