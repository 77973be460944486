"""Baseboard management controllers: IPMI of this node, and Redfish of chassis, power and cooling equipment."""
