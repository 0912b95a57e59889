"""Tool calls: parses calls in a model's output, enforces their format with a grammar, and prepares past calls."""
