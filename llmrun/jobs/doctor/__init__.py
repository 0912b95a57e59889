"""Checks whether this machine has everything llmrun needs. The entry point is `examine.examine`.

Nothing in this package prints; the caller formats the report.
"""
