"""The parts of `llmrun conversations` and /search that list, export and search saved conversations."""
