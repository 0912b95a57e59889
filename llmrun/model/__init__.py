"""What is computed: architectures, plans with their ops, and tokenizers."""
