from __future__ import annotations

import signal

import pytest

from llamaops.core.causes import Exit, explain

ONE = Exit(code=1)
MISSING = """\
0.00.006.356 E common_fit_params: encountered an error while trying to fit params: failed to load model
0.00.006.376 E gguf_init_from_file: failed to open GGUF file '/models/no such.gguf' (No such file or directory)
0.00.006.383 E llama_model_load: error loading model: llama_model_loader: failed to load model from /models/no such.gguf
0.00.006.864 E srv  llama_server: exiting due to model loading error"""
TRUNCATED = """\
0.00.018.669 E gguf_init_from_reader: failed to read key-value pairs
0.00.018.941 E llama_model_load: error loading model: llama_model_loader: failed to load model from /models/m.gguf"""
NO_MEMORY = """\
0.00.369.650 E ggml_aligned_malloc: insufficient memory (attempted to allocate 43948.12 MB)
0.00.369.688 E ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 46082949120
0.00.371.405 E llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache
0.00.371.433 E srv    load_model: failed to create_context with model '/models/m.gguf'
0.00.371.941 E srv  llama_server: exiting due to model loading error"""


@pytest.mark.parametrize(("ended", "log", "code", "exit_code", "mends", "says"), [
    (ONE, "error: invalid argument: --nope", "unknown-flag", 78, False, "--nope"),
    (ONE, 'error while handling argument "-c": stoi\n\nusage:', "bad-flag", 78, False, "-c"),
    (ONE, MISSING, "model-missing", 69, False, "/models/no such.gguf"),
    (ONE, "E gguf_init_from_file: failed to open GGUF file '/m.gguf' (Permission denied)", "model-forbidden", 69, False,
     "/m.gguf"),
    (ONE, TRUNCATED, "model-truncated", 69, False, "damaged"),
    (ONE, "tensor 'blk.3.ffn_up.weight' data is not within the file bounds, model is corrupted or incomplete",
     "model-truncated", 69, False, "damaged"),
    (ONE, "gguf_init_from_reader: invalid magic characters: '# Ne', expected 'GGUF'", "model-foreign", 69, False,
     "GGUF"),
    (ONE, "llama_model_load: error loading model: unknown model architecture: 'newllm'", "model-architecture", 69,
     False, "newllm"),
    (ONE, "E llama_init_from_model: quantized V cache requires flash_attn to be enabled\nE srv load_model: failed to "
     "create_context", "kv-type-needs-attention", 78, False, "flash attention"),
    (ONE, NO_MEMORY, "out-of-memory", 70, True, "memory"),
    (ONE, "terminate called after throwing an instance of 'std::bad_alloc'", "out-of-memory", 70, True, "memory"),
    (ONE, "E srv start: couldn't bind HTTP server socket, hostname: /x.sock, port: 8080", "cannot-bind", 75, True,
     "listen"),
    (Exit(code=127), "llamaops: cannot run /opt/llama-server: Permission denied", "cannot-run", 69, False,
     "Permission"),
    (Exit(code=127), "setpriv: failed to execute /opt/llama-server: No such file or directory", "cannot-run", 69, False,
     "No such file"),
    (Exit(code=126), "nice: '/opt/llama-server': Permission denied", "cannot-run", 69, False, "/opt/llama-server"),
    (ONE, "numactl: execution of `/opt/llama-server': No such file or directory", "cannot-run", 69, False, "No such"),
    (ONE, "nice: cannot set niceness: Permission denied", "not-permitted", 77, False, "refuses"),
    (Exit(code=127), "llama-server: error while loading shared libraries: libgomp.so.1: cannot open shared object file",
     "missing-library", 69, False, "libgomp.so.1"),
    (ONE, "llama-server: /lib/libc.so.6: version `GLIBC_2.38' not found (required by llama-server)", "old-libc", 69,
     False, "GLIBC_2.38"),
    (ONE, "chrt: failed to set pid 0's policy: Operation not permitted", "not-permitted", 77, False, "refuses"),
    (ONE, "taskset: failed to set pid 0's affinity: Invalid argument", "bad-cpus", 78, False, "CPUs"),
    (Exit(signal=signal.SIGABRT), "/src/ggml/src/ggml.c:3123: GGML_ASSERT(a->ne[2] == b->ne[2]) failed", "assertion",
     70, True, "ggml.c:3123"),
    (ONE, "error loading model hyperparameters: key not found in model: llama.block_count\nerror loading model",
     "model-unreadable", 69, False, "load"),
    (Exit(signal=signal.SIGILL), "", "illegal-instruction", 69, False, "instructions"),
    (Exit(signal=signal.SIGKILL, oom_killed=True), MISSING, "oom-killed", 70, True, "memory limit"),
    (Exit(signal=signal.SIGSEGV), "loading", "unknown", 70, True, "SIGSEGV (segmentation fault)"),
    (Exit(code=3), "", "unknown", 70, True, "exit code 3"),
])
def test_known_causes(ended: Exit, log: str, code: str, exit_code: int, mends: bool, says: str) -> None:
    cause = explain(ended, log.splitlines())
    assert (cause.code, cause.exit_code, cause.mends) == (code, exit_code, mends)
    assert says in cause.text
    assert cause.fix or code == "unknown"


@pytest.mark.parametrize("line", [
    "slot print_timing: prompt eval time = 32.15 ms / 1 tokens",
    "common_params_print_info: verbosity = 3 (adjust with the `-lv N` CLI arg)",
    "user asked: what does 'illegal' mean",
])
def test_ordinary_lines_are_no_cause(line: str) -> None:
    assert explain(ONE, [line]).code == "unknown"


@pytest.mark.parametrize(("returncode", "text"), [
    (0, "exit code 0"), (78, "exit code 78"), (-15, "SIGTERM"),
    (-11, "SIGSEGV (segmentation fault)"), (-63, "signal 63"),
])
def test_exits_are_named(returncode: int, text: str) -> None:
    assert str(Exit.of(returncode)) == text
