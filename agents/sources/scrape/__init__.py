"""Other exporters' metrics: fetched, read as series, and put under our own names by a mapping."""
