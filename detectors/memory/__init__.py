"""Memory health: ECC errors, remapped rows, DIMMs. These are not silent data corruption."""
