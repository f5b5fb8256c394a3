"""How grave an engine's lines are."""

from __future__ import annotations

import pytest

from llamaops.core.engine_lines import bare, is_at_least, level_of


@pytest.mark.parametrize(("line", "level"), [
    ("0.00.403.406 I srv    load_model: initializing, n_slots = 4", "info"),
    ("0.06.869.438 W srv          stop: cancel task, id_task = 3", "warning"),
    ("0.06.869.438 E srv  send_error: task id = 3, error: too long", "error"),
    ("1.06.869.438 D slot update_slots: n_past = 3", "debug"),
    ("0.00.403.406 an error of old: no letter", "info"),
    ("error: invalid argument: --nope", "error"),
    ("/src/ggml/ggml.c:12: GGML_ASSERT(x) failed", "error"),
    ("taskset: failed to set pid 0's affinity: Operation not permitted", "error"),
    ("warning: failed to mlock", "warning"),
    ("llamaops: starting → ready: the engine answers", "info"),
    ("a story about an error", "info"),
    ("", "info"),
])
def test_levels(line: str, level: str) -> None:
    assert level_of(line) == level
    assert is_at_least(line, "debug") and is_at_least(line, "error") == (level == "error")


def test_lines_that_differ_in_their_time_alone_are_alike() -> None:
    assert bare("0.00.000.001 W priority") == bare("9.59.999.999 W priority") == "W priority"
    assert bare("0.00.000.001 W priority") != bare("0.00.000.001 E priority")
    assert bare("3.14 is not a stamp") == "3.14 is not a stamp"
