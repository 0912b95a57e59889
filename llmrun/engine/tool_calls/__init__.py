"""Tool calls: parses them from a model's output, enforces them with a grammar, and prepares past ones."""
