"""What a simulated fleet does by nature: load, heat, power, links, hosts, coolant, and what is read of them."""
