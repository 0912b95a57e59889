"""Contains the modules that every room may use: errors, types, child processes, machine facts and machine code."""
