"""What llama-server is told about requests: slots, context, and the batch that keep the latency promises."""

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

DEPTH = 512
"""Tokens of context that the promises are made for, a conversation of a few turns; rates are measured on empty ones."""
ATTENTION_COST = 4
"""An operation of attention takes so many times one of the weights (two CPUs, SmolLM2: 274 tok/s empty, 181 at 512)."""
SPREAD = 1.5
"""The 99th percentile of gaps over their mean while prompts are read; 1.3 to 1.6 measured, SmolLM2 and Qwen2.5-0.5B."""

QUESTION = 64
"""Tokens of a short question with its template: the least prompt that ``slo.ttft_ms`` is held against."""

GFLOPS_PER_THREAD = (("avx512f", 100.0), ("avx2", 40.0), ("i8mm", 40.0), ("asimddp", 25.0), ("asimd", 10.0))
SLOWEST_GFLOPS = 6.0
"""Conservative prefill speed of one thread on 4-bit weights, by the best instruction set; measured on AVX-512: 128."""

BANDWIDTH = {1: 6e9, 2: 12e9}
"""Bytes of weights a second that decode reads with one thread, and with two or more; measured on two: 20e9."""


MEASURED_UBATCH = 64
"""Prefill is measured in batches of about the size that an inter-token budget leads to; larger ones run faster."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What this engine, model and placement were measured to do, tokens a second.

    ``prefill_tok_s`` in batches of 64, ``decode_tok_s`` of one stream, ``small_tok_s`` prefill in batches of 8: some
    quant types have no kernels for a few rows at once. None: not measured.
    """

    prefill_tok_s: float
    decode_tok_s: float
    small_tok_s: float | None = None

    def slower(self, factor: float) -> Calibration:
        """Return the same with all rates lower by a factor."""
        small = self.small_tok_s and self.small_tok_s / factor
        return Calibration(self.prefill_tok_s / factor, self.decode_tok_s / factor, small)

    def batch_costs(self) -> tuple[float, float]:
        """Return the seconds that any batch takes (weights are read once), and those that each row of it adds."""
        if self.small_tok_s is None:
            return 1 / self.decode_tok_s, 1 / self.prefill_tok_s
        few, many = MIN_UBATCH / self.small_tok_s, MEASURED_UBATCH / self.prefill_tok_s
        each = (many - few) / (MEASURED_UBATCH - MIN_UBATCH) if many > few else many / MEASURED_UBATCH
        return few - MIN_UBATCH * each, each


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


def choose_slots(profile: Profile, threads: int, context: int, measured: Calibration | None, findings: Findings) -> int:
    """Return how many requests are answered at once: two for each decode thread, at most four, unless told.

    Fewer, but two at least, where a short question then keeps ``slo.ttft_ms`` beside the other streams, by rates that
    were measured. Never one: the next question would wait for a whole answer.
    """
    if profile.serve.slots != "auto":
        findings.because("serving.slots", "as the profile says")
        return profile.serve.slots
    slots = most = min(MAX_AUTO_SLOTS, 2 * threads)
    if measured is not None:
        ubatch = _batch(profile, context, measured)
        in_time = (n for n in range(most, 1, -1) if read_in_time(profile, n, ubatch, measured) >= QUESTION)
        slots = next(in_time, most)
    findings.because("serving.slots", f"streams share the weights' way through the cache; {slots} on {threads} "
                     f"{'thread' if threads == 1 else 'threads'}, further requests wait in the queue" if slots == most
                     else f"with {most}, a prompt of {QUESTION} tokens would miss slo.ttft_ms {profile.slo.ttft_ms:g}")
    return slots


def estimate(model: Model | None, threads: int, host: Host) -> Calibration | None:
    """Return a conservative guess of the rates from model size, threads and instruction set; None without a model."""
    if model is None or model.size_bytes <= 0:
        return None
    parameters = model.parameters or model.size_bytes * 8 / 4.5
    per_thread = next((speed for flag, speed in GFLOPS_PER_THREAD if flag in host.isa), SLOWEST_GFLOPS)
    return Calibration(prefill_tok_s=threads * per_thread * 1e9 / (2 * parameters),
                       decode_tok_s=BANDWIDTH[min(threads, 2)] / model.size_bytes)


def with_context(rates: Calibration, model: Model | None, context: int) -> Calibration:
    """Return what is left of the rates once attention has some context to read.

    A token takes two operations for each parameter, and four for each layer, head, its width and token of context.
    """
    if model is None or not (model.parameters and model.layers and model.heads and model.head_dim_k):
        return rates
    attention = 4 * model.layers * model.heads * model.head_dim_k * min(context, DEPTH)
    return rates.slower(1 + ATTENTION_COST * attention / (2 * model.parameters))


def step_ms(slots: int, ubatch: int, rates: Calibration) -> float:
    """Return the time between two tokens while, beside other slots, prompts fill the rest of each batch."""
    any_batch, each = rates.batch_costs()
    return 1000 * (1 / rates.decode_tok_s if slots == 1 else any_batch + ubatch * each)


def least_step_ms(slots: int, rates: Calibration) -> float:
    """Return the least time between two tokens: a decode step and, beside other slots, the least batch of a prompt."""
    return step_ms(slots, MIN_UBATCH, rates)


def keeps_itl(profile: Profile, slots: int, rates: Calibration) -> bool:
    """Tell whether the mean gap of streams can keep ``slo.itl_ms``."""
    return least_step_ms(slots, rates) <= profile.slo.itl_ms


def read_in_time(profile: Profile, slots: int, ubatch: int, rates: Calibration) -> int:
    """Return how many tokens of a prompt are read within ``slo.ttft_ms`` while all other slots decode."""
    seconds = profile.slo.ttft_ms / 1000
    if slots == 1:
        return int(rates.prefill_tok_s * max(0.0, seconds - 1 / rates.decode_tok_s))
    steps = int(profile.slo.ttft_ms / step_ms(slots, ubatch, rates))
    return steps * max(0, ubatch - (slots - 1))  # each of the others has a row of every batch


def note_promises(profile: Profile, slots: int, ubatch: int, rates: Calibration, findings: Findings) -> None:
    """Say what the machine can promise by measured rates, and what it can't."""
    tokens, limit = read_in_time(profile, slots, ubatch, rates), f"slo.ttft_ms {profile.slo.ttft_ms:g}"
    others = "nothing else runs" if slots == 1 else "another stream runs" if slots == 2 else f"{slots - 1} others run"
    if tokens >= QUESTION:
        findings.info("latency-promise", f"a prompt of up to {tokens} tokens has its first token within {limit} while "
                      f"{others}; tokens come about every {step_ms(slots, ubatch, rates):.0f} ms meanwhile (measured)")
    else:
        findings.degraded("ttft-budget-unmet", f"{limit} can't be kept: while {others}, only {tokens} tokens of a "
                          "prompt are read in that time (measured); use a smaller model, a larger slo.itl_ms, or fewer "
                          "serve.slots")


def choose_batch(profile: Profile, model: Model | None, slots: int, context: int, rates: Calibration | None, *,
                 measured: bool, findings: Findings) -> int:
    """Return the micro-batch; the logical batch is the same, so that no batch exceeds the budget.

    While others decode, every batch stops their streams for its own length; the inter-token budget, less what the
    slowest gaps are above the mean, is what a batch may take. With one slot there is nobody to wait.
    """
    if is_embedding(model):
        findings.because("serving.ubatch", "an embedding model reads a whole prompt in one batch")
        return context
    if slots == 1:
        findings.because("serving.ubatch", "one slot: no other stream waits for a prompt")
        return _longest(context)
    if rates is None:
        findings.because("serving.ubatch", "nothing is known of the model; a middle size")
        return min(64, _rounded(context))
    size = _batch(profile, context, rates)
    source = "measured" if measured else "estimated"
    findings.because("serving.ubatch", f"{profile.slo.itl_ms:g} ms between tokens at the 99th percentile; a batch of "
                     f"{size} takes about {step_ms(slots, size, rates):.0f} ms with {min(context, DEPTH)} tokens of "
                     f"context ({source})")
    least_ms = least_step_ms(slots, rates)
    if (SPREAD * least_ms if measured else least_ms) > profile.slo.itl_ms:  # an estimate is on the safe side already
        findings.degraded("itl-budget-unmet", f"slo.itl_ms {profile.slo.itl_ms:g} can't be kept while another prompt "
                          f"is read: a batch of {MIN_UBATCH} takes about {least_ms:.0f} ms ({source}), and the slowest "
                          "gaps half as much again; use a smaller model, or serve.slots: 1")
    return size


def _batch(profile: Profile, context: int, rates: Calibration) -> int:
    """Return the largest micro-batch whose 99th percentile of gaps keeps ``slo.itl_ms``."""
    any_batch, each = rates.batch_costs()
    fitting = (profile.slo.itl_ms / 1000 / SPREAD - any_batch) / each
    return max(MIN_UBATCH, min(_longest(context), _rounded(int(fitting))))


def _longest(context: int) -> int:
    return min(MAX_UBATCH, _rounded(context))


def _rounded(tokens: int) -> int:
    """Round down to whole blocks of the matrix kernels: 32, 8 below 64, 4 below 32."""
    block = 32 if tokens >= 64 else 8 if tokens >= 32 else 4
    return tokens // block * block
