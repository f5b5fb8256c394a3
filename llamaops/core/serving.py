"""What llama-server is told about requests: slots, context, and the batch that keeps the inter-token promise."""

from __future__ import annotations

from dataclasses import dataclass

from llamaops.core.model import Model, is_embedding
from llamaops.core.notes import Findings
from llamaops.core.profile import Profile
from llamaops.core.topology import Host

MAX_AUTO_SLOTS = 4
MAX_UBATCH = 512
MIN_UBATCH = 8
"""Below eight rows the matrix kernels of llama.cpp lose their blocking, and prefill costs as much as decode."""

GFLOPS_PER_THREAD = (("avx512f", 100.0), ("avx2", 40.0), ("i8mm", 40.0), ("asimddp", 25.0), ("asimd", 10.0))
SLOWEST_GFLOPS = 6.0
"""Conservative prefill speed of one thread on 4-bit weights, by the best instruction set; measured on AVX-512: 128."""

BANDWIDTH = {1: 6e9, 2: 12e9}
"""Bytes of weights a second that decode reads with one thread, and with two or more; measured on two: 20e9."""

@dataclass(frozen=True, slots=True)
class Calibration:
    """What this engine, model and placement were measured to do, tokens a second of one stream."""

    prefill_tok_s: float
    decode_tok_s: float


def choose_context(profile: Profile, model: Model | None, findings: Findings) -> int:
    """Return tokens per slot: the profile's, or the default capped at what the model was trained for."""
    context, trained = profile.model.context, model.context_train if model else None
    stated = "context" in profile.model.model_fields_set
    findings.because("serving.context", "as the profile says" if stated else "the default")
    if trained is None or context <= trained:
        return context
    if stated:
        findings.risk("context-above-training", f"context {context} is more than the {trained} tokens the model was "
                      "trained for; llama-server uses no more than that")
        return context
    findings.because("serving.context", f"all that the model was trained for ({trained})")
    return trained


def choose_slots(profile: Profile, threads: int, findings: Findings) -> int:
    """Return how many requests are answered at once: two for each decode thread, at most four, unless told."""
    if profile.serve.slots != "auto":
        findings.because("serving.slots", "as the profile says")
        return profile.serve.slots
    slots = min(MAX_AUTO_SLOTS, 2 * threads)
    findings.because("serving.slots", f"streams share the weights' way through the cache; {slots} on {threads} "
                     f"{'thread' if threads == 1 else 'threads'}, further requests wait in the queue")
    return slots


def estimate(model: Model | None, threads: int, host: Host) -> Calibration | None:
    """Return a conservative guess of the rates from model size, threads and instruction set; None without a model."""
    if model is None or model.size_bytes <= 0:
        return None
    parameters = model.parameters or model.size_bytes * 8 / 4.5
    per_thread = next((speed for flag, speed in GFLOPS_PER_THREAD if flag in host.isa), SLOWEST_GFLOPS)
    return Calibration(prefill_tok_s=threads * per_thread * 1e9 / (2 * parameters),
                       decode_tok_s=BANDWIDTH[min(threads, 2)] / model.size_bytes)


def least_step_ms(slots: int, rates: Calibration) -> float:
    """Return the least time between two tokens: a decode step and, beside other slots, the least batch of a prompt."""
    beside = MIN_UBATCH / rates.prefill_tok_s if slots > 1 else 0.0
    return 1000 * (1 / rates.decode_tok_s + beside)


def keeps_itl(profile: Profile, slots: int, rates: Calibration) -> bool:
    """Tell whether streams can keep ``slo.itl_ms``."""
    return least_step_ms(slots, rates) <= profile.slo.itl_ms


def choose_batch(profile: Profile, model: Model | None, slots: int, context: int, rates: Calibration | None, *,
                 measured: bool, findings: Findings) -> int:
    """Return the micro-batch; the logical batch is the same, so that no batch exceeds the budget.

    While others decode, every batch of prompt tokens stops their streams for its own length: the inter-token budget
    less one decode step is what a batch may take. With one slot there is nobody to wait.
    """
    if is_embedding(model):
        findings.because("serving.ubatch", "an embedding model reads a whole prompt in one batch")
        return context
    if slots == 1:
        findings.because("serving.ubatch", "one slot: no other stream waits for a prompt")
        return min(MAX_UBATCH, _rounded(context))
    if rates is None:
        findings.because("serving.ubatch", "nothing is known of the model; a middle size")
        return min(64, _rounded(context))
    budget_s = profile.slo.itl_ms / 1000 - 1 / rates.decode_tok_s
    fitting = rates.prefill_tok_s * budget_s
    size = max(MIN_UBATCH, min(MAX_UBATCH, _rounded(int(fitting)), _rounded(context)))
    source = "measured" if measured else "estimated"
    findings.because("serving.ubatch", f"{profile.slo.itl_ms:g} ms between tokens, less a decode step of "
                     f"{1000 / rates.decode_tok_s:.0f} ms, at {rates.prefill_tok_s:.0f} prompt tokens a second "
                     f"({source})")
    if not keeps_itl(profile, slots, rates):
        findings.degraded("itl-budget-unmet", f"slo.itl_ms {profile.slo.itl_ms:g} can't be kept while another prompt "
                          f"is read: a batch of {MIN_UBATCH} takes about {1000 * MIN_UBATCH / rates.prefill_tok_s:.0f} "
                          f"ms and a decode step {1000 / rates.decode_tok_s:.0f} ms ({source}); use a smaller model, "
                          "or serve.slots: 1")
    return size


def _rounded(tokens: int) -> int:
    """Round down to whole blocks of the matrix kernels: 32, or 8 below 64."""
    return tokens // 32 * 32 if tokens >= 64 else tokens // 8 * 8
