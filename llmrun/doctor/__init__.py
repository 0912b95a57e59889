"""Diagnosis of this machine: everything that llmrun needs. Start at `examine.examine`; nothing here prints."""
