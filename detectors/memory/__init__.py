"""Memory health: ECC errors, remapped rows, DIMMs. Never called silent data corruption."""
