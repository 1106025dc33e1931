#!/usr/bin/env python3
"""Makes the golden checkpoints of tests/golden/formats: one for each weight format, with logits for a prompt.

    python3 -m venv .venv && .venv/bin/pip install torch transformers numpy compressed-tensors
    .venv/bin/python scripts/make_golden_formats.py            all of them
    .venv/bin/python scripts/make_golden_formats.py CASE…      some cases alone

What a stored matrix means is found by code that is not ours where there is some for a CPU: transformers for FP8 in
blocks, compressed-tensors for its formats. AWQ and GPTQ are packed and read here, from their definitions. The weights are then
rounded to bf16, once, as warpdraft defines it, and transformers computes the logits in f32.

A case of `--weights` has no weights of its own: golden.json names the plain checkpoint and the mode.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from make_golden import FAMILIES, PLAIN, byte_level_tokenizer, write_json
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent / "tests" / "golden"
# The layer after the activations has two groups of inputs, gate and up have two blocks of outputs.
SIZES = dict(vocab_size=272, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=1,
             num_key_value_heads=1, tie_word_embeddings=True)
ROWS = 7
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def words(nibbles: torch.Tensor) -> torch.Tensor:
    """Eight values of the last dimension a word, the first lowest."""
    parts = nibbles.reshape(*nibbles.shape[:-1], -1, 8).to(torch.int64)
    packed = (parts << (4 * torch.arange(8))).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).contiguous()


def grouped(weight: torch.Tensor, group: int) -> torch.Tensor:
    return weight.reshape(weight.shape[0], -1, group)


def with_zeros(weight: torch.Tensor, scale_type: torch.dtype, group: int = 128):
    """Codes [out, in], scales and zeros [out, groups], 16 steps from the least weight to the greatest."""
    parts = grouped(weight, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).to(scale_type).float()
    zero = (-low / scale).round().clamp(0, 15)
    codes = ((parts / scale[..., None]).round() + zero[..., None]).clamp(0, 15)
    return codes.reshape(weight.shape).int(), scale, zero.int()


def symmetric(weight: torch.Tensor, scale_type: torch.dtype, group: int = 128):
    """The same with 8 for zero."""
    parts = grouped(weight, group)
    scale = (parts.abs().amax(-1) / 7.5).to(scale_type).float()
    codes = ((parts / scale[..., None]).round() + 8).clamp(0, 15)
    return codes.reshape(weight.shape).int(), scale, torch.full(scale.shape, 8, dtype=torch.int32)


def meaning(codes, scale, zero, group_of):
    """The weights, in f32."""
    return (codes - zero[:, group_of]).float() * scale[:, group_of]


def even(inputs: int, group: int = 128) -> torch.Tensor:
    return torch.arange(inputs) // group


# Each takes a layer's weight, [out, in] f32, and gives its tensors, and what they mean (none: a library says).

def fp8_blocks(weight: torch.Tensor):
    out, inputs = weight.shape
    blocks = weight.reshape(out // 128, 128, inputs // 128, 128)
    scale = (blocks.abs().amax((1, 3)) / 448).to(torch.bfloat16)
    codes = (blocks / scale.float()[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes.reshape(out, inputs), "weight_scale_inv": scale}, None


def fp8_channels(weight: torch.Tensor):
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    return {"weight": (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn), "weight_scale": scale}, None


def awq(weight: torch.Tensor):
    codes, scale, zero = with_zeros(weight, torch.float16)
    order = (torch.arange(weight.shape[0]).reshape(-1, 8)[:, AWQ_ORDER]).flatten()
    tensors = {"qweight": words(codes.T[:, order]), "qzeros": words(zero.T[:, order]),
               "scales": scale.T.half().contiguous()}
    return tensors, meaning(codes, scale, zero, even(weight.shape[1]))


def gptq_tensors(codes, scale, zero, group_of):
    # Stored zeros are one less.
    return {"qweight": words(codes).T.contiguous(), "qzeros": words(zero.T - 1), "scales": scale.T.half().contiguous(),
            "g_idx": group_of.int()}


def gptq(weight: torch.Tensor):
    codes, scale, zero = symmetric(weight, torch.float16)
    group_of = even(weight.shape[1])
    # The exporter gives every layer a bias; of those that have none it is zeros.
    return {**gptq_tensors(codes, scale, zero, group_of), "bias": torch.zeros(len(weight), dtype=torch.float16)}, \
        meaning(codes, scale, zero, group_of)


def gptq_desc_act(weight: torch.Tensor):
    group_of = even(weight.shape[1], 64)[torch.randperm(weight.shape[1])]
    order = torch.argsort(group_of, stable=True)
    codes, scale, zero = symmetric(weight[:, order], torch.float16, 64)
    codes = codes[:, torch.argsort(order)]
    return gptq_tensors(codes, scale, zero, group_of), meaning(codes, scale, zero, group_of)


def w4a16(weight: torch.Tensor):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    codes, scale, _ = symmetric(weight, torch.bfloat16)
    return {"weight_packed": pack_to_int32((codes - 8).to(torch.int8), 4), "weight_scale": scale.bfloat16(),
            "weight_shape": torch.tensor(weight.shape)}, None


def w4a16_zeros(weight: torch.Tensor):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    codes, scale, zero = with_zeros(weight, torch.bfloat16, 64)
    return {"weight_packed": pack_to_int32((codes - 8).to(torch.int8), 4), "weight_scale": scale.bfloat16(),
            "weight_zero_point": pack_to_int32((zero - 8).to(torch.int8), 4, packed_dim=0).contiguous(),
            "weight_shape": torch.tensor(weight.shape)}, None


def compressed(weights: dict, how: str, activations: dict | None = None) -> dict:
    group = {"targets": ["Linear"], "input_activations": activations, "output_activations": None, "weights": weights}
    return {"quant_method": "compressed-tensors", "format": how, "quantization_status": "compressed",
            "ignore": ["lm_head"], "kv_cache_scheme": None, "config_groups": {"group_0": group}}


def int4(group: int, symmetric: bool) -> dict:
    return {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group,
            "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {}}


EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "damp_percent": 0.01}

# name: (family, what makes a layer's tensors, type of the other weights, quantization_config)
CASES = {
    "fp8_blocks": ("qwen3", fp8_blocks, torch.bfloat16, {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}),
    "fp8_channels": ("qwen3", fp8_channels, torch.bfloat16, compressed(
        {**EIGHT_BITS, "strategy": "channel", "dynamic": False}, "float-quantized",
        {**EIGHT_BITS, "strategy": "token", "dynamic": True})),
    "awq": ("qwen3", awq, torch.float16, {
        "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
        "modules_to_not_convert": None}),
    "gptq_qwen2": ("qwen2", gptq, torch.float16, GPTQ),
    "gptq_desc_act": ("qwen3", gptq_desc_act, torch.float16, {**GPTQ, "group_size": 64, "desc_act": True}),
    "w4a16": ("qwen3", w4a16, torch.bfloat16, compressed(int4(128, True), "pack-quantized")),
    "w4a16_zeros": ("llama", w4a16_zeros, torch.bfloat16, compressed(int4(64, False), "pack-quantized")),
}


def make_case(name: str, family: str, layer_tensors, dtype: torch.dtype, quantization: dict) -> None:
    torch.manual_seed(sum(name.encode()))
    out = ROOT / "formats" / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    config_class, model_class, own = FAMILIES[family]
    tokenizer = byte_level_tokenizer()
    ids = [tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
    config = config_class(**SIZES, **own, max_position_embeddings=256, rms_norm_eps=1e-6, rope_parameters=dict(PLAIN),
                          eos_token_id=ids[1], attn_implementation="eager", dtype=dtype)
    model = model_class(config)
    stored, meant, original = {}, {}, {}
    with torch.no_grad():
        for key, p in model.named_parameters():
            layer = key.removesuffix(".weight")
            if key.endswith("norm.weight"):
                p.copy_(1 + 0.2 * torch.randn_like(p))
            elif key.endswith("bias"):
                p.copy_(0.5 * torch.randn_like(p))
            elif "embed_tokens" in key:
                p.copy_(0.3 * torch.randn_like(p))
            else:
                p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5)
            if layer.endswith(LINEAR):
                original[key] = p.detach().clone()
                tensors, meant[key] = layer_tensors(original[key])
                for part, tensor in tensors.items():
                    # The model's own biases go before those of zeros.
                    stored.setdefault(f"{layer}.{part}", tensor.contiguous())
            else:
                stored[key] = p.detach().to(dtype)
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    config.to_json_file(out / "config.json", use_diff=False)
    fields = json.loads((out / "config.json").read_text())
    kept = {"architectures": [model_class.__name__], **{key: fields[key] for key in fields if key in KEPT},
            "quantization_config": quantization}
    write_json(out / "config.json", kept)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    write_json(out / "tokenizer_config.json", {"eos_token": "<|im_end|>"})

    if quantization["quant_method"] == "fp8":
        # transformers turns what it cannot multiply on a CPU into floats.
        library = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
        found = dict(library.named_parameters())
        meant = {key: found[key].detach().float() for key in meant}
    elif quantization["quant_method"] == "compressed-tensors":
        meant = {key: decompressed(key.removesuffix("weight"), stored, quantization) for key in meant}
    for key, weight in meant.items():
        error = (weight - original[key]).norm() / original[key].norm()
        assert error < 0.13, f"{name}: {key} is off by {error}"
    state = {key: stored[key].float() for key in dict(model.named_parameters()) if key in stored and key not in meant}
    # Rounded once to bf16: what is multiplied with.
    state |= {key: weight.bfloat16().float() for key, weight in meant.items()}
    finish(out, model, state, {})


def decompressed(layer: str, stored: dict, quantization: dict) -> torch.Tensor:
    """The weight of a layer, by compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    scheme = QuantizationScheme.model_validate(quantization["config_groups"]["group_0"])
    tensors = {key.removeprefix(layer): tensor for key, tensor in stored.items() if key.startswith(layer)}
    # In f32: the rounding is ours.
    tensors["weight_scale"] = tensors["weight_scale"].float()
    compressor = BaseCompressor.get_value_from_registry(quantization["format"])
    return compressor.decompress(tensors, scheme)["weight"].float()


KEPT = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "model_type",
        "tie_word_embeddings", "hidden_act", "eos_token_id", "dtype"}


def finish(out: Path, model, state: dict, description: dict) -> None:
    """Logits of a prompt by the model with these weights, in f32."""
    missing, unexpected = model.float().load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    prompt = torch.randint(0, 270, (ROWS,)).tolist()
    with torch.no_grad():
        logits = model.eval()(torch.tensor([prompt])).logits[0].numpy().astype("<f4")
    assert np.isfinite(logits).all()
    (out / "logits.f32").write_bytes(logits.tobytes())
    write_json(out / "golden.json", {"prompt": prompt, "rows": ROWS, "vocab": logits.shape[1], **description,
                                     "transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]})
    print(f"{out.name}: {sum(f.stat().st_size for f in out.iterdir())} bytes, logits within ±{np.abs(logits).max():.2f}")


def rounded(mode: str, weight: torch.Tensor) -> torch.Tensor:
    """What `--weights` makes of a bf16 weight, as f32."""
    out, inputs = weight.shape
    if mode == "fp8":
        blocks = weight.reshape(out // 128, 128, inputs // 128, 128)
        scale = (blocks.abs().amax((1, 3), keepdim=True) / 448).bfloat16().float()
        return ((blocks * (1 / scale)).to(torch.float8_e4m3fn).float() * scale).reshape(out, inputs)
    parts = grouped(weight, 128)
    low, high = parts.amin(-1, keepdim=True).clamp(max=0), parts.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (-low / scale).round().clamp(0, 15)
    # The product with the zero is a bf16 too: of the eight bits, as many are dropped as the zero's odd part has.
    odd = torch.tensor([0, 1, 1, 3, 1, 5, 3, 7, 1, 9, 5, 11, 3, 13, 7, 15])[zero.long()]
    last = torch.where(odd > 1, 2.0 ** (torch.frexp(odd.float())[1] + torch.frexp(scale)[1] - 8).float(), 0)
    scale = torch.where(odd > 1, ((scale / last + 0.5).floor() * last), scale)
    assert torch.equal((zero * scale).bfloat16().float(), zero * scale)
    inverse = 1 / scale
    codes = ((parts * inverse).round() + zero).clamp(0, 15)
    return ((codes - zero) * scale).reshape(out, inputs)


def make_rounded(mode: str) -> None:
    torch.manual_seed(len(mode))
    out = ROOT / "formats" / f"rounded_{mode}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(ROOT / "tied_bf16", dtype=torch.float32, attn_implementation="eager")
    state = {key: tensor.float() for key, tensor in load_file(ROOT / "tied_bf16" / "model.safetensors").items()}
    for key, weight in state.items():
        if key.removesuffix(".weight").endswith(LINEAR):
            state[key] = rounded(mode, weight).bfloat16().float()
    finish(out, model, state, {"checkpoint": "tied_bf16", "weights": mode})


if __name__ == "__main__":
    modes = {f"rounded_{mode}": mode for mode in ("fp8", "int4")}
    for case in sys.argv[1:] or [*CASES, *modes]:
        if case in modes:
            make_rounded(modes[case])
        else:
            make_case(case, *CASES[case])
