"""Site topology from files: one module a source, merged with stated precedence."""
