"""What the InfiniBand management tools say of a fabric's switches: links, switches, counters, and who asks them."""
