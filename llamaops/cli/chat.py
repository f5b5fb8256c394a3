"""``llamaops chat``: stream answers in the terminal."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamaops.direct import DIRECT
from llamaops.errors import EngineFailed, NotRunning, UsageError

if TYPE_CHECKING:
    import httpx

Message = dict[str, str]


@click.command()
@click.argument("words", nargs=-1, metavar="[PROFILE|NAME|URL] [PROMPT]...")
@click.option("--system", metavar="TEXT", help="A system message to begin with.")
@click.option("--max-tokens", type=click.IntRange(1), help="Stop after this many tokens.")
@click.option("--temperature", type=float, help="Sampling temperature (0: always the likeliest token).")
@click.option("--api-key", envvar="LLAMAOPS_API_KEY", show_envvar=True, help="Key, where the server wants one.")
def chat(words: tuple[str, ...], system: str | None, max_tokens: int | None, temperature: float | None,
         api_key: str | None) -> None:
    """Stream one answer, or hold a conversation, in the terminal.

    The first word may say who to talk to: a profile file or the name of a running instance, or the base URL of any
    OpenAI-compatible server. Without it, the one running instance answers. The rest is the prompt; without a prompt the
    terminal becomes a conversation (an empty line or Ctrl-D ends it), and a prompt given on standard input is answered
    once.

    \b
    Examples:
      llamaops chat "Why is the sky blue?"
      llamaops chat examples/quickstart.yaml
      llamaops chat http://127.0.0.1:8080/v1 "Say hi" --max-tokens 20
      echo "Summarise: …" | llamaops chat

    Exit codes: 0 answered · 64 nothing is running · 70 the server failed.
    """
    url, certificate, prompt = _target(words)
    if temperature is not None and not math.isfinite(temperature):
        raise UsageError("--temperature takes a number", why=f"{temperature} is none")
    options = {"max_tokens": max_tokens, "temperature": temperature}
    history: list[Message] = [{"role": "system", "content": system}] if system else []
    with _client(url, api_key, certificate) as client:
        for question in _questions(prompt):
            history.append({"role": "user", "content": question})
            history.append({"role": "assistant", "content": _answer(client, history, options)})


def _target(words: tuple[str, ...]) -> tuple[str, str | None, str]:
    """Split the words into a base URL (ending in /v1), the certificate file to expect there, and a prompt."""
    from llamaops.cli.run import instance_urls

    urls = instance_urls()
    if words and (named := _named(words[0], urls)):
        return f"{named[0]}/v1", named[1], " ".join(words[1:])
    if len(urls) == 1:
        url, certificate = next(iter(urls.values()))
        return f"{url}/v1", certificate, " ".join(words)
    if not urls:
        raise NotRunning("nothing is running here", fix="start it: llamaops up PROFILE   (or give a URL)")
    raise UsageError("several instances are running", why=", ".join(sorted(urls)), fix="name one: llamaops chat NAME …")


def _named(word: str, urls: dict[str, tuple[str, str | None]]) -> tuple[str, str | None] | None:
    """Return the base URL and certificate that a first word names, None when the word is part of a prompt."""
    if word.startswith(("http://", "https://")):
        return word.rstrip("/").removesuffix("/v1"), None
    is_file = word.endswith((".yaml", ".yml"))
    name = word
    if is_file:
        from llamaops.prepare import load_profile

        name = load_profile(Path(word)).name
    if name in urls:
        return urls[name]
    if is_file:
        raise NotRunning(f"{name} is not running", where=word, fix=f"start it: llamaops up {word}")
    return None


def _client(url: str, api_key: str | None, certificate: str | None) -> httpx.Client:
    import httpx

    from llamaops.serve.tls import trusting

    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise UsageError("the API key can't be sent", why="it holds characters that a header can't",
                         fix="check LLAMAOPS_API_KEY or --api-key")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    # A long prompt on a small machine is silent for minutes: no time-out once the connection stands.
    return httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(None, connect=10), mounts=DIRECT,
                        verify=trusting(certificate) if certificate else True)


def _questions(prompt: str) -> Iterator[str]:
    """Yield the prompt, or what is typed until the conversation ends."""
    if prompt:
        yield prompt
    elif not sys.stdin.isatty():
        if text := sys.stdin.buffer.read().decode(errors="replace").strip():
            yield text
    else:
        import readline  # noqa: F401  # editing and history in input()

        while line := _read_line():
            yield line


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        click.echo()
        return ""


def _answer(client: httpx.Client, history: list[Message], options: dict[str, Any]) -> str:
    """Stream one answer to stdout and return its text."""
    import httpx

    from llamaops.core.sse import SSEDecoder

    body = {"messages": history, "stream": True} | {k: v for k, v in options.items() if v is not None}
    text: list[str] = []
    try:
        with client.stream("POST", "chat/completions", json=body) as response:
            if response.status_code != 200:
                raise _refused(response.status_code, response.read(), str(client.base_url))
            decoder = SSEDecoder()
            for chunk in response.iter_bytes():
                for event in decoder.feed(chunk):
                    text.append(_show(event.data.decode(), str(client.base_url)))
    except httpx.ConnectError as exc:
        if "CERTIFICATE_VERIFY_FAILED" in str(exc):
            raise EngineFailed("the server's certificate is not trusted here", where=str(client.base_url), why=str(exc),
                               fix="SSL_CERT_FILE=FILE.pem llamaops chat …, with its certificate or its CA's") from exc
        raise NotRunning("no server answers there", where=str(client.base_url), why=str(exc),
                         fix="start it: llamaops up PROFILE") from exc
    except httpx.HTTPError as exc:
        raise EngineFailed("the stream broke off", where=str(client.base_url), why=str(exc) or type(exc).__name__,
                           fix="llamaops status tells why; ask again") from exc
    click.echo()
    return "".join(text)


def _show(data: str, where: str) -> str:
    """Print the text of one event and return it."""
    if data == "[DONE]":
        return ""
    document = json.loads(data)
    if error := document.get("error"):
        click.echo()
        raise EngineFailed("the stream ended with an error", where=where, why=str(error.get("message")),
                           fix="llamaops status tells why; ask again")
    choices = document.get("choices") or [{}]
    text = choices[0].get("delta", {}).get("content") or ""
    sys.stdout.write(text)
    sys.stdout.flush()
    return text


def _refused(status: int, body: bytes, where: str) -> EngineFailed:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    fix = "give the key: --api-key or LLAMAOPS_API_KEY" if status == 401 else None
    return EngineFailed(f"the server answered {status}", where=where, why=message, fix=fix)


