"""GGUF files: the one strict reader that stands before every backend. `reader.open_gguf` is the door."""
