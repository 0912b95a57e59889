"""Child processes for work on untrusted input: no environment, no open files, limited time and memory."""
