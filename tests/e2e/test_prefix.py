"""Conversations find their computed prefix again, whichever slot it is in: counted in tokens (docs/adr)."""

from __future__ import annotations

import httpx
import pytest
from running import Up

SYSTEM = "You are a careful librarian. " * 40


def turns(client: httpx.Client, conversations: int, rounds: int) -> list[tuple[int, int]]:
    """Hold conversations in turn; return for each later turn the tokens that came from a cache, and those computed."""
    talks = [[{"role": "system", "content": SYSTEM}] for _ in range(conversations)]
    found = []
    for number in range(rounds):
        for which, talk in enumerate(talks):
            talk.append({"role": "user", "content": f"Reader {which} asks for book {number}: " + f"tale {which} " * 60})
            answer = client.post("/v1/chat/completions", json={"messages": talk, "max_tokens": 8, "temperature": 0})
            document = answer.json()
            talk.append(document["choices"][0]["message"])
            if number:
                found.append((document["timings"]["cache_n"], document["timings"]["prompt_n"]))
    return found


@pytest.mark.parametrize(("conversations", "slots"), [(2, 2), (5, 2)])
def test_a_conversation_computes_only_what_is_new(up: Up, conversations: int, slots: int) -> None:
    running = up("--set", f"serve.slots={slots}")
    with httpx.Client(base_url=running.url, timeout=300) as client:
        found = turns(client, conversations, 3)
    assert len(found) == 2 * conversations
    # At its first turn a conversation may displace another one with the same system prompt, so that this one finds only
    # that again; from then on each finds all of its turns.
    assert all(cached > 200 for cached, _ in found), found
    assert all(cached > 2 * computed for cached, computed in found[conversations:]), found
