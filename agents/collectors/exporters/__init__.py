"""Other exporters' metrics: fetched over HTTP, parsed as series, translated to our signals by a mapping file."""
