"""In Python processes that `scripts/test --quick` starts: a kernel's compiler ends at once and says why."""

import os
import sys

if "llmrun.kernels.compiler" in sys.orig_argv:
    os.write(2, b"a quick test compiles a kernel: mark it `slow`\n")
    os._exit(1)
