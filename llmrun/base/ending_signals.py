"""The signals that ask a program to end.

Ctrl-C (SIGINT) is not among them, because in some commands it ends only the current work. On Windows, programs cannot
send SIGTERM to each other, but Ctrl-Break and closing the console window send SIGBREAK.
"""

from __future__ import annotations

import signal
import sys

if sys.platform == "win32":
    TERMINATING: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGBREAK)
    HANGUP: tuple[signal.Signals, ...] = ()
else:
    TERMINATING = (signal.SIGTERM,)
    HANGUP = (signal.SIGHUP,)  # the terminal is gone; a chat then saves and ends
