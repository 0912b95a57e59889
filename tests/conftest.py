"""What every test starts from: nobody's own settings, and caches that outlive a run."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

CACHE = Path(__file__).resolve().parent.parent / ".tests-cache"

for variable in [name for name in os.environ if name.startswith("LLMRUN_") and name != "LLMRUN_TEST_CACHE"]:
    del os.environ[variable]
# Without bytecode each process that a test starts would compile our sources anew: a tenth of a second.
for variable in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(variable, None)

# Compiled kernels are kept between runs (seconds each); the folder is not the user's own.
os.environ["LLMRUN_CACHE_DIR"] = str(CACHE / "cache")
os.environ["LLMRUN_DATA_DIR"] = str(CACHE / "data")
CACHE.mkdir(exist_ok=True)
os.environ["LLMRUN_CONFIG"] = str(CACHE / "config.toml")
Path(os.environ["LLMRUN_CONFIG"]).touch()

# NumPy's own threads wait for each other by spinning: beside other tests that costs many times what they save.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# A deadline is a timed assert: on a busy machine it fails for no reason of ours.
settings.register_profile("llmrun", deadline=None, print_blob=True)
settings.load_profile("llmrun")
