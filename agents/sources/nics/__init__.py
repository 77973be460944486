"""What the collectors of network ports share: names, tables, parsers of what the kernel and the modules say."""
