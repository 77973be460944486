"""What the collectors of accelerators beside NVIDIA's share: names of entities, columns of values, asking a library."""
