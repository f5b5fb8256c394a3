"""What llama-server says about itself, in the spellings of several builds."""

from __future__ import annotations

import pytest

from llamaops.core.cpuset import CpuSet
from llamaops.core.engine import (
    compile_jobs,
    lacking,
    missing_part,
    openmp_of,
    parse_features,
    parse_help,
    parse_version,
    takes_unix_socket,
    unused,
)
from llamaops.core.topology import Cgroup, Host

HELP = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
--version                               show version and build info
-t,    --threads N                      number of CPU threads to use during generation (default: -1)
                                        (env: LLAMA_ARG_THREADS)
-C,    --cpu-mask M                     CPU affinity mask: arbitrarily long hex. Complements cpu-range
--poll <0...100>                        use polling level to wait for work (0 - no polling, default: 50)
-fa,   --flash-attn [on|off|auto]       set Flash Attention use ('on', 'off', or 'auto', default: 'auto')
--perf, --no-perf                       whether to enable internal libllama performance timings (default:
                                        false)
-hf,   -hfr, --hf-repo <user>/<model>[:quant]
                                        Hugging Face model repository; quant is optional, case-insensitive,
                                        example: -hf user/model, --hf-repo user/model
--repack, -nr, --no-repack              whether to enable weight repacking (default: enabled)
--spec-draft-type-k, -ctkd, --cache-type-k-draft TYPE
                                        KV cache data type for K for the draft model
--host HOST                             IP addresses to listen on, comma-separated, or UNIX socket paths
                                        ending in .sock; with multiple TCP addresses, :: binds IPv6 only;
"""


def test_help_gives_every_spelling_and_nothing_else() -> None:
    assert parse_help(HELP) == {
        "-h", "--help", "--usage", "--version", "-t", "--threads", "-C", "--cpu-mask", "--poll", "-fa", "--flash-attn",
        "--perf", "--no-perf", "-hf", "-hfr", "--hf-repo", "--repack", "-nr", "--no-repack", "--spec-draft-type-k",
        "-ctkd", "--cache-type-k-draft", "--host",
    }  # fmt: skip


def test_help_of_something_else_has_no_flags() -> None:
    assert parse_help("usage: thing [-x]\n  -x  do x\n----- not an option -----\n") == frozenset()


def test_unix_socket_is_read_from_help() -> None:
    assert takes_unix_socket(HELP)
    assert not takes_unix_socket("--host HOST   ip address to listen (default: 127.0.0.1)")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("version: 0.6.0-dev (build 11434, commit unknown)\nbuilt with GNU 12.2.0 for Linux x86_64\n", "b11434"),
        ("version: 5432 (abcdef0)\nbuilt with cc (Debian 12.2.0-14) 12.2.0 for x86_64-linux-gnu\n", "b5432"),
        ("ggml_cuda_init: found 0 devices\nversion: 4000 (x)\n", "b4000"),
        ("version: 0 (unknown)\n", None),
        ("version: 0.6.0 (build 0, commit unknown)\n", None),
        ("something 1.2.3", None),
        ("", None),
    ],
)
def test_version(text: str, version: str | None) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("text", "runtime"),
    [
        ("\tlibgomp.so.1 => /lib/x86_64-linux-gnu/libgomp.so.1 (0x00007f)\n", "libgomp"),
        ("\tlibomp.so.5 => /usr/lib/llvm/libomp.so.5 (0x0)\n", "libomp"),
        ("\tlibiomp5.so => /opt/intel/libiomp5.so (0x0)\n", "libomp"),
        ("\tlibm.so.6 => /lib/libm.so.6 (0x0)\n", None),
    ],
)
def test_openmp_runtime(text: str, runtime: str | None) -> None:
    assert openmp_of(text) == runtime


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("./llama-server: /lib/libc.so.6: version `GLIBC_2.38' not found (required by x)", "GLIBC_2.38"),
        ("x: /lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by x)", "GLIBCXX_3.4.32"),
        ("x: error while loading shared libraries: libgomp.so.1: cannot open shared object file", "libgomp.so.1"),
        ("\tlibgomp.so.1 => not found\n", "libgomp.so.1"),
        ("error: unknown argument", None),
    ],
)
def test_what_the_loader_misses(text: str, part: str | None) -> None:
    assert missing_part(text) == part


@pytest.mark.parametrize(
    ("host", "jobs"),
    [
        (Host(), 1),
        (Host(online=CpuSet.parse("0-7"), mem_available=64 << 30), 8),
        (Host(online=CpuSet.parse("0-7"), affinity=CpuSet.parse("2-4"), mem_available=64 << 30), 3),
        (Host(online=CpuSet.parse("0-63"), cgroup=Cgroup(quota_cpus=2.5), mem_available=64 << 30), 2),
        (Host(online=CpuSet.parse("0-63"), cgroup=Cgroup(memory_headroom=3 << 30), mem_available=64 << 30), 3),
        (Host(online=CpuSet.parse("0-3"), mem_available=100 << 20), 1),
        (Host(online=CpuSet.parse("0-3"), cgroup=Cgroup(cpuset=CpuSet.parse("1")), mem_available=9 << 30), 1),
    ],
)
def test_compile_jobs(host: Host, jobs: int) -> None:
    assert compile_jobs(host) == jobs


SYSTEM = ("0.00.1 I x: system_info: n_threads = 2 (n_threads_batch = 2) / 2 | CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | "
          "LLAMAFILE = 1 | OPENMP = 1 |\nother AVX = 1")


def test_features_are_those_of_the_system_line() -> None:
    assert parse_features(SYSTEM) == ("SSE3", "AVX2")
    assert parse_features("no such line AVX = 1") == ()


@pytest.mark.parametrize(("features", "cpu", "missing", "idle"), [
    (("AVX2", "AVX512"), "avx2 fma", ["AVX512"], ["FMA"]),
    (("AVX2",), "", [], []),
    ((), "avx2", [], []),
    (("NEON", "DOTPROD"), "neon", ["DOTPROD"], []),
    (("NEON",), "asimd asimddp", [], ["DOTPROD"]),
])
def test_features_against_a_cpu(features: tuple[str, ...], cpu: str, missing: list[str], idle: list[str]) -> None:
    assert lacking(features, cpu) == missing
    assert unused(features, cpu) == idle
