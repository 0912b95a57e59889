"""Make kernel compilation fail with an explanation in all processes that `scripts/test --quick` starts."""

import os
import sys

if "llmrun.kernels.compiler" in sys.orig_argv:
    os.write(2, b"a quick test compiles a kernel: mark it `push`\n")
    os._exit(1)
