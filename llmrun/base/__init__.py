"""What every room may use: errors, types, child processes, facts about the machine, and machine code."""
