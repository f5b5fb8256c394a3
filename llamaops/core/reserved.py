"""Engine flags and variables that the plan or the relay owns, and the profile key that sets each instead."""

from __future__ import annotations

import re

_NONE = "llamaops decides it"
_FLAGS: tuple[tuple[str, str], ...] = (
    (r"--(host|port|reuse-port)", "set serve.host and serve.port"),
    (r"--(api-prefix|path|ssl-.*)", "the engine sits behind the relay, on a private socket"),
    (r"--api-key.*", "set serve.api_keys"),
    (r"--cors-.*|--no-cors-.*", "set serve.cors_origins"),
    (r"-m|--model|-mu|--model-url|-dr|--docker-repo|-hf.*|--hf-.*", "set model.source"),
    (r"--models-.*|--no-models-.*", "one profile serves one model"),
    (r"--(embd|fim|gpt-oss|vision)-[a-z0-9.-]+-(default|spec)", "it chooses a model; set model.source"),
    (r"-a|--alias", "set model.aliases"),
    (r"-c|--ctx-size", "set model.context"),
    (r"-ctk|-ctv|--cache-type-[kv]", "set model.kv_type"),
    (r"-cram|--cache-ram", "set memory.prompt_cache_mib"),
    (r"--mlock", "set memory.lock"),
    (r"-t|--threads", "set placement.threads"),
    (r"-tb|--threads-batch", "set placement.threads_batch"),
    (r"--threads-.*|-t(b?)d|--spec-draft-threads.*", _NONE),
    (r"-C(r?)(b?)(d?)|--(spec-draft-)?cpu-(mask|range|strict).*", "set placement.cpus"),
    (r"--(spec-draft-)?prio.*", "set placement.policy and placement.nice"),
    (r"--(spec-draft-)?poll.*", "set placement.spin"),
    (r"--numa", "set placement.numa"),
    (r"-np|--parallel|-ns|--sequences", "set serve.slots"),
    (r"-b|--batch-size|-ub|--ubatch-size", "it follows from slo.itl_ms"),
    (r"--metrics|--(no-)?slots|--props", "the relay needs them as it sets them"),
    (r"--(no-)?(web)?ui(-.*)?", "the relay serves the page"),
    (r"--tools.*|--mcp-.*|-(no-)?ag|--(no-)?agent", "they let clients run programs on this machine"),
    (r"--log-(file|disable)", "the supervisor reads the engine's log; see llamaops logs"),
    (r"-h|--help|--usage|--version|--completion-bash|-cl|--cache-list|--list-devices", "the engine would not serve"),
)
"""Spellings of llama.cpp's common/arg.cpp, older builds included; first match wins."""

_VARIABLES: tuple[tuple[str, str], ...] = (
    (r"LLAMA_ARG_.*", "it overrides the plan; use the profile's keys, or engine.args"),
    (r"LLAMA_API_KEY", "set serve.api_keys"),
    (r"LLAMA_SERVER_(CHILD_MODE|ROUTER_PORT)", _NONE),
    (r"LD_(PRELOAD|AUDIT)", "it would load foreign code into every program of the launch chain"),
    (r"(GOMP_SPINCOUNT|KMP_BLOCKTIME|OMP_WAIT_POLICY)", "set placement.spin"),
    (r"(GOMP_CPU_AFFINITY|KMP_AFFINITY|OMP_PLACES|OMP_PROC_BIND)", "set placement.cpus"),
    (r"(OMP|MKL|OPENBLAS|NUMEXPR|BLIS)_NUM_THREADS|OMP_(THREAD_LIMIT|DYNAMIC)", "set placement.threads"),
    (r"LC_NUMERIC|LC_ALL", "the engine reads numbers as in C"),
)


def reserved_flag(arg: str) -> tuple[str, str] | None:
    """Return the flag and what to do instead, if ``arg`` (one element of argv) is a flag the profile may not give.

    The value of ``--flag=value`` is not in the answer: it may be a secret. llama.cpp takes ``_`` for ``-`` in long
    flags.
    """
    flag = arg.partition("=")[0].strip()
    return _find(_FLAGS, flag.replace("_", "-") if flag.startswith("--") else flag, flag)


def reserved_variable(name: str) -> tuple[str, str] | None:
    """Return the variable and what to do instead, if the profile may not set it for the engine."""
    return _find(_VARIABLES, name, name)


def _find(table: tuple[tuple[str, str], ...], key: str, shown: str) -> tuple[str, str] | None:
    return next(((shown, hint) for pattern, hint in table if re.fullmatch(pattern, key)), None)
