"""How weights are stored: one file per format family, each the readable specification of its blocks."""
