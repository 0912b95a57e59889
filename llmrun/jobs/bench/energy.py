"""Computes the energy per token and the electricity cost of a million tokens."""

from __future__ import annotations

from llmrun.jobs.bench.documents.document import Energy

_JOULES_PER_KWH = 3.6e6


def energy_of(
    joules: float, seconds: float, tokens: int, *, source: str, price_kwh: float | None = None
) -> Energy | None:
    """Return the energy and cost of `tokens` generated in `seconds`, or None if nothing was generated.

    `price_kwh` is the price of one kilowatt-hour, and the cost is in the same currency. The energy used for prefill is
    attributed to the generated tokens.
    """
    if tokens <= 0 or seconds <= 0:
        return None
    per_token = joules / tokens
    cost = None if price_kwh is None else per_token * 1e6 / _JOULES_PER_KWH * price_kwh
    return Energy(source, watts=joules / seconds, joules_per_token=per_token, cost_per_million=cost)


def beside_api(cost_per_million: float, price_per_million: float) -> tuple[float, str]:
    """Compare the electricity cost of a million generated tokens with an API's price in the same currency.

    Returns the ratio of cost to price, and a sentence that states it. Raises ValueError if the price is not positive.
    """
    if price_per_million <= 0:
        raise ValueError(f"the price of a million tokens must be greater than 0, not {price_per_million}")
    ratio = cost_per_million / price_per_million
    if ratio == 0:
        return 0.0, f"Electricity is free here, and the API charges {price_per_million:.3g} for a million tokens."
    compared = f"{1 / ratio:.3g} times cheaper" if ratio < 1 else f"{ratio:.3g} times the price"
    return ratio, (
        f"Electricity for a million generated tokens costs {cost_per_million:.3g}, and the API charges "
        f"{price_per_million:.3g}: {compared}."
    )
