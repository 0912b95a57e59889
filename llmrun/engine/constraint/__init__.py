"""Constrained answers: JSON that matches a schema, or text that matches a regular expression, a grammar or a choice."""
