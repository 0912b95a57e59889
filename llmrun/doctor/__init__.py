"""What of this machine llmrun needs, and what it found. Nothing here prints; `examine.examine` is the door."""
