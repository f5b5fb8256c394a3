"""A small Qwen2 model in Hugging Face format: the real vocabulary, random weights."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors_bytes import Tensor, safetensors

WIDTH, FFN, LAYERS, HEADS, KV_HEADS = 256, 512, 2, 4, 2
SEEN, SEEING_LAYERS = 64, 3
"""Width and depth of the part that reads images; the converter takes its merger's ``mlp.2`` for a third layer."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def write_qwen2(folder: Path, vocabulary: Path) -> Path:
    """Write the model into a new folder; ``vocabulary`` is ``models/ggml-vocab-qwen2.gguf`` of the engine's source."""
    folder.mkdir(parents=True)
    fields = gguf.GGUFReader(vocabulary).fields
    tokens, merges = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.merges"].contents()
    first = tokens.index(SPECIAL[0])
    write(folder / "vocab.json", {token: i for i, token in enumerate(tokens[:first])})
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    added = {str(first + i): {"content": token, "special": True, "lstrip": False, "normalized": False, "rstrip": False,
                              "single_word": False} for i, token in enumerate(SPECIAL)}
    write(folder / "tokenizer_config.json",
          {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, "chat_template": TEMPLATE,
           "eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "model_max_length": 2048})
    write(folder / "config.json",
          {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": WIDTH,
           "vocab_size": len(tokens), "intermediate_size": FFN, "num_hidden_layers": LAYERS,
           "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 2048,
           "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True, "torch_dtype": "float16",
           "hidden_act": "silu", "bos_token_id": first, "eos_token_id": first + 2})
    (folder / "model.safetensors").write_bytes(safetensors(tensors(len(tokens))))
    return folder


def write(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")


def tensors(vocabulary: int) -> dict[str, Tensor]:
    """Return every weight of the model by its name there."""
    rng, head = np.random.default_rng(1), WIDTH // HEADS

    def weight(*shape: int) -> Tensor:
        return "F16", shape, (rng.standard_normal(shape, dtype=np.float32) * 0.02).astype(np.float16).tobytes()

    def ones(size: int) -> Tensor:
        return "F16", (size,), np.ones(size, dtype=np.float16).tobytes()

    found = {"model.embed_tokens.weight": weight(vocabulary, WIDTH), "model.norm.weight": ones(WIDTH)}
    for layer in range(LAYERS):
        shapes = {"self_attn.q_proj.weight": (WIDTH, WIDTH), "self_attn.q_proj.bias": (WIDTH,),
                  "self_attn.k_proj.weight": (KV_HEADS * head, WIDTH), "self_attn.k_proj.bias": (KV_HEADS * head,),
                  "self_attn.v_proj.weight": (KV_HEADS * head, WIDTH), "self_attn.v_proj.bias": (KV_HEADS * head,),
                  "self_attn.o_proj.weight": (WIDTH, WIDTH), "mlp.gate_proj.weight": (FFN, WIDTH),
                  "mlp.up_proj.weight": (FFN, WIDTH), "mlp.down_proj.weight": (WIDTH, FFN)}
        found |= {f"model.layers.{layer}.{name}": weight(*shape) for name, shape in shapes.items()}
        found |= {f"model.layers.{layer}.{name}.weight": ones(WIDTH)
                  for name in ("input_layernorm", "post_attention_layernorm")}
    return found


def write_qwen2_vl(folder: Path, vocabulary: Path) -> Path:
    """Write a model that sees, too (Qwen2-VL), into a new folder: the same text part, and layers that read images."""
    write_qwen2(folder, vocabulary)
    config = json.loads((folder / "config.json").read_text())
    seeing = {"depth": SEEING_LAYERS, "embed_dim": SEEN, "num_heads": 2, "hidden_size": WIDTH, "in_chans": 3,
              "mlp_ratio": WIDTH // SEEN, "patch_size": 14, "spatial_patch_size": 14, "spatial_merge_size": 2,
              "temporal_patch_size": 2, "model_type": "qwen2_vl"}
    write(folder / "config.json", config | {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "vision_config": seeing,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}})
    write(folder / "preprocessor_config.json", {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "min_pixels": 3136, "max_pixels": 50176, "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]})
    found = tensors(config["vocab_size"]) | seeing_tensors()
    (folder / "model.safetensors").write_bytes(safetensors(found))
    return folder


def seeing_tensors() -> dict[str, Tensor]:
    """Return every weight of the part that reads images."""
    rng, merged = np.random.default_rng(3), 4 * SEEN
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (SEEN, 3, 2, 14, 14), "merger.ln_q.weight": (SEEN,), "merger.ln_q.bias": (SEEN,),
        "merger.mlp.0.weight": (merged, merged), "merger.mlp.0.bias": (merged,),
        "merger.mlp.2.weight": (WIDTH, merged), "merger.mlp.2.bias": (WIDTH,)}
    for layer in range(SEEING_LAYERS):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in {
            "norm1.weight": (SEEN,), "norm1.bias": (SEEN,), "norm2.weight": (SEEN,), "norm2.bias": (SEEN,),
            "attn.qkv.weight": (3 * SEEN, SEEN), "attn.qkv.bias": (3 * SEEN,), "attn.proj.weight": (SEEN, SEEN),
            "attn.proj.bias": (SEEN,), "mlp.fc1.weight": (WIDTH, SEEN), "mlp.fc1.bias": (WIDTH,),
            "mlp.fc2.weight": (SEEN, WIDTH), "mlp.fc2.bias": (SEEN,)}.items()}
    return {f"visual.{name}": ("F16", shape, rng.standard_normal(shape, dtype=np.float32).astype(np.float16).tobytes())
            for name, shape in shapes.items()}


def write_lora(folder: Path, base: Path) -> Path:
    """Write a LoRA adapter of that model into a new folder, as PEFT saves it; strong enough to change every answer."""
    folder.mkdir(parents=True)
    rng, rank, found = np.random.default_rng(2), 4, {}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", WIDTH), ("v_proj", KV_HEADS * WIDTH // HEADS)):
            for part, shape in (("lora_A", (rank, WIDTH)), ("lora_B", (rows, rank))):
                data = rng.standard_normal(shape, dtype=np.float32)
                key = f"base_model.model.model.layers.{layer}.self_attn.{name}.{part}.weight"
                found[key] = "F32", shape, data.tobytes()
    write(folder / "adapter_config.json",
          {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": rank,
           "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"})
    (folder / "adapter_model.safetensors").write_bytes(safetensors(found))
    return folder
