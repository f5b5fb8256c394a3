"""``model.quantize: auto``: which quant types come into question, and what a measured one says of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llamaops.core.fits import Variant, estimated, total_at
from llamaops.core.memory import format_bytes
from llamaops.core.model import Model
from llamaops.core.profile import Profile
from llamaops.core.serving import Calibration, keeps_itl, least_step_ms

SLACK = 1.25
"""A type predicted to miss the budget by less than this is measured: kernels differ, bytes are not all."""


@dataclass(frozen=True, slots=True)
class Rated:
    """How fast a file is, in so many slots; ``measured`` or estimated."""

    rates: Calibration
    slots: int
    measured: bool

    def keeps(self, profile: Profile) -> bool:
        """Tell whether streams keep ``slo.itl_ms``."""
        return keeps_itl(profile, self.slots, self.rates)

    def of(self, size_bytes: int, other_bytes: int) -> Rated:
        """Predict a file of another size: a decode step, or a small batch, reads all of the weights once."""
        prefill, same = self.rates.prefill_tok_s, self.rates.slower(other_bytes / size_bytes)
        return replace(self, rates=replace(same, prefill_tok_s=prefill))

    def slower(self, factor: float) -> Rated:
        """Return the same with rates lower by a factor."""
        return replace(self, rates=self.rates.slower(factor))


@dataclass(frozen=True, slots=True)
class Passed:
    """A type that was not chosen, and why."""

    quant: str | None
    why: str


def candidates(profile: Profile, model: Model, available: int | None) -> tuple[list[Variant], list[Passed]]:
    """Return what fits into ``available`` bytes, best first: the file as it is, then types of fewer and fewer bits.

    What does not fit is returned with the sums. Where nothing fits, the smallest is left: the plan tells what it lacks.
    """
    *variants, last = estimated(model)
    checked = [(variant, too_large(profile, model, variant, available)) for variant in variants]
    return [*(v for v, passed in checked if passed is None), last], [passed for _, passed in checked if passed]


def too_large(profile: Profile, model: Model, variant: Variant, available: int | None) -> Passed | None:
    """Return why a variant does not fit, None where it does; one slot of the profile's context counts."""
    trained, stated = model.context_train or profile.model.context, "context" in profile.model.model_fields_set
    total = total_at(model, variant, profile.model.context if stated else min(profile.model.context, trained))
    if available is None or total <= available:
        return None
    return Passed(variant.quant, f"needs {format_bytes(total)} of {format_bytes(available)}")


def surely_misses(profile: Profile, known: Rated, size_bytes: int, variant: Variant) -> bool:
    """Tell whether a type is far too slow by what was measured of another: it need not be made to know."""
    return not known.of(size_bytes, variant.size_bytes).slower(1 / SLACK).keeps(profile)


def explain(profile: Profile, quant: str | None, rated: Rated | None, passed: Sequence[Passed]) -> str:
    """Say why a type was chosen."""
    text = f"auto chose {quant or 'the file as it is'}"
    if rated is None:
        return f"{text}: it fits, and nothing is known of its speed"
    step, how = least_step_ms(rated.slots, rated.rates), "measured" if rated.measured else "estimated"
    against = "within" if rated.keeps(profile) else "more than"
    text += f": a step takes {step:.0f} ms ({how}), {against} slo.itl_ms {profile.slo.itl_ms:g}"
    return text + "".join(f"; {p.quant or 'as it is'} {p.why}" for p in passed)
