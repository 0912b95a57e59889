"""Saves cached prefixes in files, so that another process can continue from them."""
