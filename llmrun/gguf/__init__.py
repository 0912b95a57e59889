"""The strict GGUF reader that every backend uses. Its entry point is `reader.open_gguf`."""
