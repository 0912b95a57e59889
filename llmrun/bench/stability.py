def is_stable(v):
    return len(v) >= 3
