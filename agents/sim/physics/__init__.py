"""Physics of a simulated fleet: load, heat, power, links, hosts, coolant, and their instruments."""
