"""Chat templates: untrusted programs in model files that turn a conversation into the prompt format of the model."""
