"""Where measurements come from: pure parsers and thin readers, of which the collectors are made."""
