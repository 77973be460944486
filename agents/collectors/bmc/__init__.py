"""Baseboard management controllers: IPMI of this node, Redfish of chassis, power and cooling equipment."""
