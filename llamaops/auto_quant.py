"""``model.quantize: auto``: make and measure quant types, best first, until one keeps the profile's speed (ADR 23)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llamaops.core.engine import Engine
from llamaops.core.fits import Variant
from llamaops.core.memory import available_memory
from llamaops.core.model import Model, is_embedding
from llamaops.core.plan import Plan, plan
from llamaops.core.profile import Profile
from llamaops.core.quant_choice import Passed, Rated, candidates, explain, surely_misses, too_large
from llamaops.core.serving import Calibration, estimate, least_step_ms
from llamaops.core.topology import Host

Make = Callable[[str], Model]
"""Returns the model as a quant type."""
Measure = Callable[[Model, Plan], Calibration | None]
"""Returns the rates of a file under a plan, None where they can't be measured now."""


def choose(profile: Profile, source: Model, host: Host, engine: Engine, make: Make, measure: Measure) -> Model:
    """Return the best of ``source`` and its smaller types that fits this machine and keeps ``slo.itl_ms``.

    Where none keeps it, the smallest; ``chosen`` tells why. Raises what ``make`` raises.
    """
    limit = None if profile.memory.limit == "auto" else profile.memory.limit
    available = available_memory(host, limit)[0]
    left, passed = candidates(profile, source, available)
    known: tuple[Rated, int] | None = None
    for variant in left[:-1]:
        if known and surely_misses(profile, *known, variant):
            passed.append(Passed(variant.quant, "would be slower still"))
            continue
        model = source if variant.file else make(variant.quant or "")
        if larger := too_large(profile, source, Variant(model.quant, model.size_bytes), available):
            passed.append(larger)  # small models keep more bits than their type says
            continue
        rated = _rate(profile, host, model, engine, measure)
        if rated is None or rated.keeps(profile):
            return replace(model, chosen=explain(profile, model.quant, rated, passed))
        passed.append(Passed(variant.quant, f"takes {least_step_ms(rated.slots, rated.rates):.0f} ms"))
        known = rated, model.size_bytes
    model = source if left[-1].file else make(left[-1].quant or "")
    rated = _rate(profile, host, model, engine, measure)
    return replace(model, chosen=explain(profile, model.quant, rated, passed))


def _rate(profile: Profile, host: Host, model: Model, engine: Engine, measure: Measure) -> Rated | None:
    """Measure a file, or estimate where the machine is busy; None for what streams no tokens."""
    if is_embedding(model):
        return None
    planned = plan(profile, host, model, engine)
    if rates := measure(model, planned):
        return Rated(rates, planned.serving.slots, True)
    guess = estimate(model, planned.placement.threads, host)
    return Rated(guess, planned.serving.slots, False) if guess else None
