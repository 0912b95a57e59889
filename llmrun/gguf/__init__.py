"""A strict GGUF reader, which every backend uses. The entry point is `reader.open_gguf`."""
