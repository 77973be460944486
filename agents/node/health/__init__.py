"""Node health: the status that the agent writes about its node, and `fleetpulse check` for schedulers.

The check must start fast: only `report`, which runs in the agent, loads NumPy.
"""
