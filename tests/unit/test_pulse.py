from __future__ import annotations

import pytest

from llamaops.serve.pulse import Pulse, Sign


def still_after(signs: list[Sign], *, every: float = 1.0, starved: bool = False) -> float:
    pulse = Pulse(0.0, Sign(0.0, 0, 0), 1.0)
    still = 0.0
    for n, sign in enumerate(signs, 1):
        still = pulse.feel(n * every, sign, lambda: starved)
    return still


@pytest.mark.parametrize(("signs", "still_s"), [
    ([Sign(0.0, 0, 0)] * 5, 5.0),
    ([Sign(n / 2, 0, 0) for n in range(1, 6)], 0.0),  # half a CPU
    ([Sign(0.0, n, 0) for n in range(1, 6)], 0.0),  # reads
    ([Sign(0.0, 0, n) for n in range(1, 6)], 0.0),  # log lines
    ([Sign(0.0, 0, 1)] + [Sign(0.0, 0, 1)] * 3, 3.0),  # one line, then nothing
    ([Sign(n * 0.004, 0, 0) for n in range(1, 11)], 10.0),  # pings and probes only: 0.4 % of a CPU
    ([Sign(n * 0.02, 0, 0) for n in range(1, 11)], 0.0),  # 2 %
])
def test_progress(signs: list[Sign], still_s: float) -> None:
    assert still_after(signs) == still_s


def test_an_engine_kept_from_the_cpu_is_not_frozen() -> None:
    assert still_after([Sign(0.0, 0, 0)] * 5, starved=True) == 0.0


def test_time_in_which_nobody_looked_hardly_counts() -> None:
    """We were stopped ourselves, or the machine slept."""
    assert still_after([Sign(0.0, 0, 0)], every=3600.0) == 2.0
