"""How models are stored: GGUF files, block formats, and memory layouts that Python and the kernels share."""
