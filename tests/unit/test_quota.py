"""What a key may use, on a clock of our own."""

from __future__ import annotations

import pytest

from llamaops.serve.quota import KeyLimits, OverLimit, Quotas


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_requests_at_a_time() -> None:
    quotas, limits = Quotas(), KeyLimits(concurrency=2)
    quotas.enter("a", limits)
    quotas.enter("a", limits)
    with pytest.raises(OverLimit, match="concurrency"):
        quotas.enter("a", limits)
    quotas.enter("b", limits)
    quotas.leave("a", 0, limits)
    quotas.enter("a", limits)


def test_tokens_a_minute_come_back_evenly() -> None:
    clock = Clock()
    quotas, limits = Quotas(clock), KeyLimits(tokens_per_minute=600)
    quotas.enter("a", limits)
    quotas.leave("a", 900, limits)
    with pytest.raises(OverLimit) as over:
        quotas.enter("a", limits)
    assert over.value.retry_after_s == 31
    clock.now += 29
    with pytest.raises(OverLimit):
        quotas.enter("a", limits)
    clock.now += 2
    quotas.enter("a", limits)
    quotas.leave("a", 0, limits)
    quotas.enter("b", limits)


def test_without_limits_nothing_is_kept() -> None:
    quotas = Quotas()
    for _ in range(3):
        quotas.enter("a", KeyLimits())
        quotas.leave("a", 10**9, KeyLimits())
    assert (quotas._open, quotas._spent) == ({}, {})
