import math
import statistics as s

import numpy as np

from llmrun.bench.document import Distribution


def distribution(v):
    return Distribution(
        len(v),
        s.median(v),
        s.fmean(v),
        s.stdev(v) if len(v) > 1 else 0.0,
        float(np.percentile(v, 95)) if len(v) >= 20 else None,
        float(np.percentile(v, 99)) if len(v) >= 100 else None,
    )


def paired_ratio(a, b, *, is_speed, level=0.99):
    d = np.log(np.array(a) / np.array(b)) * (1 if is_speed else -1)
    se = 2.8 * d.std(ddof=1) / math.sqrt(len(d)) if len(d) > 1 else 1
    m = d.mean()
    return math.exp(m), math.exp(m - se), math.exp(m + se)
