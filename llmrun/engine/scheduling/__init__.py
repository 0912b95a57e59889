"""Scheduling: which requests run, and which of their tokens run in a step. No schedule changes an answer."""
