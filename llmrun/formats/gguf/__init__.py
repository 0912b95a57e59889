"""A strict GGUF reader, which every backend uses, and a GGUF writer. The entry point is `reader.open_gguf`."""
