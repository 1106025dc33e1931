#!/usr/bin/env python3
"""Compares warpdraft with Hugging Face transformers on a Qwen3-8B-shaped checkpoint of random weights.

Runs on a machine with a GPU of at least 40 GB, with torch, transformers and safetensors, and warpdraft in dist/gpu
(`make gpu-check`). Makes the checkpoint, then reports

- the error of the logits against transformers in float32, of transformers in bfloat16 and of warpdraft;
- whether the greedy choice is the same wherever float32's two best are further apart than the error;
- decode tokens a second of both: transformers with a static cache and torch.compile, warpdraft without drafts.

The weights are normal with standard deviation 0.02 (norm weights: 1 plus a tenth of that), the tokens uniform.
"""

import argparse
import gc
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import torch
from safetensors.torch import save_file

SHAPES = {
    "8b": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
               num_key_value_heads=8, vocab_size=151936, tie_word_embeddings=False),
    "0.6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                 num_key_value_heads=8, vocab_size=151936, tie_word_embeddings=True),
}


def make_checkpoint(folder: pathlib.Path, shape: dict, tokenizer: pathlib.Path) -> None:
    """Writes a checkpoint in Hugging Face format, in shards of a few layers."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", torch_dtype="bfloat16", head_dim=128,
        hidden_act="silu", attention_bias=False, rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=40960,
        use_sliding_window=False, eos_token_id=4091, initializer_range=0.02, **shape)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]:
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    torch.manual_seed(1)

    def normal(*size):
        return (torch.randn(*size, device="cuda", dtype=torch.float32) * 0.02).to(torch.bfloat16).cpu()

    def ones(*size):
        return (1 + torch.randn(*size) * 0.002).to(torch.bfloat16)

    h, inner = shape["hidden_size"], shape["intermediate_size"]
    q, kv = shape["num_attention_heads"] * 128, shape["num_key_value_heads"] * 128
    shards, index, size = [], {}, 0
    shard = {"model.embed_tokens.weight": normal(shape["vocab_size"], h), "model.norm.weight": ones(h)}
    if not shape["tie_word_embeddings"]:
        shard["lm_head.weight"] = normal(shape["vocab_size"], h)
    for i in range(shape["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shard |= {
            p + "input_layernorm.weight": ones(h), p + "post_attention_layernorm.weight": ones(h),
            p + "self_attn.q_proj.weight": normal(q, h), p + "self_attn.k_proj.weight": normal(kv, h),
            p + "self_attn.v_proj.weight": normal(kv, h), p + "self_attn.o_proj.weight": normal(h, q),
            p + "self_attn.q_norm.weight": ones(128), p + "self_attn.k_norm.weight": ones(128),
            p + "mlp.gate_proj.weight": normal(inner, h), p + "mlp.up_proj.weight": normal(inner, h),
            p + "mlp.down_proj.weight": normal(h, inner),
        }
        if i % 9 == 8 or i + 1 == shape["num_hidden_layers"]:
            shards.append(shard)
            shard = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index |= {tensor: name for tensor in shard}
        size += sum(t.nbytes for t in shard.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": index}))


def load(folder: pathlib.Path, dtype: torch.dtype):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cuda").eval()


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@torch.no_grad()
def reference_logits(folder: pathlib.Path, dtype: torch.dtype, ids: torch.Tensor) -> torch.Tensor:
    model = load(folder, dtype)
    logits = model(ids).logits[0].float().cpu()
    del model
    release()
    return logits


@torch.no_grad()
def transformers_decode_rate(folder: pathlib.Path, ids: torch.Tensor) -> float:
    """Tokens a second with a static cache and torch.compile, from the difference of two lengths."""
    model = load(folder, torch.bfloat16)

    def run(tokens: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                       do_sample=False, cache_implementation="static", pad_token_id=0,
                       temperature=None, top_k=None, top_p=None)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    # One cache length for all, so that nothing is compiled again.
    model.generation_config.max_length = 512
    run(320)
    run(320)
    rates = [256 / (run(320) - run(64)) for _ in range(3)]
    del model
    release()
    print("transformers, static cache and torch.compile, tok/s:", [round(r, 1) for r in rates])
    return sorted(rates)[1]


def read_bandwidth() -> float:
    """GB/s of a device-to-device copy, read and written: the same run's yardstick."""
    a = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    del a, b
    release()
    return 2 * (8 << 30) / (sorted(times)[len(times) // 2] * 1e-3) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for the checkpoint, 17 GB")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON file for the figures")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--tokens", type=int, default=192, help="length of the compared prompt")
    parser.add_argument("--skip-decode", action="store_true", help="logits alone")
    args = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parents[2]
    binaries = root / "dist/gpu"
    folder = args.work / args.shape
    clock = time.perf_counter()

    def lap(what: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        print(f"[{now - clock:6.1f} s] {what}", flush=True)
        clock = now

    if not (folder / "model.safetensors.index.json").exists():
        make_checkpoint(folder, SHAPES[args.shape], root / "model/demo")
    lap("checkpoint made")

    torch.backends.cuda.matmul.allow_tf32 = False
    ids = torch.randint(0, 4000, (1, args.tokens), generator=torch.Generator().manual_seed(2)).cuda()
    exact = reference_logits(folder, torch.float32, ids)
    lap("transformers, float32")
    theirs = reference_logits(folder, torch.bfloat16, ids)
    lap("transformers, bfloat16")
    tokens_file, logits_file = args.work / "tokens.u32", args.work / "logits.f32"
    ids[0].cpu().numpy().astype("<u4").tofile(tokens_file)
    subprocess.run([binaries / "score", folder, "cuda", tokens_file, logits_file], check=True)
    ours = torch.from_numpy(np.fromfile(logits_file, dtype="<f4").reshape(exact.shape))
    lap("warpdraft")

    def relative(x: torch.Tensor) -> float:
        return ((x - exact).norm() / exact.norm()).item()

    best = exact.topk(2).values
    margin = best[:, 0] - best[:, 1]
    clear = margin > (ours - exact).abs().max(dim=1).values
    same = ours.argmax(dim=1) == exact.argmax(dim=1)
    figures = {
        "parity.logits_rel_err": relative(ours),
        "parity.hf_logits_rel_err": relative(theirs),
        "parity.clear_choices": int(clear.sum()),
        "parity.clear_choices_equal": int((clear & same).sum()),
        "parity.equal_choices": int(same.sum()),
        "parity.hf_equal_choices": int((theirs.argmax(dim=1) == exact.argmax(dim=1)).sum()),
        "parity.choices": args.tokens,
    }
    ok = figures["parity.logits_rel_err"] <= figures["parity.hf_logits_rel_err"] and bool((same | ~clear).all())

    if not args.skip_decode:
        figures["copy_gb_s"] = read_bandwidth()
        rates = []
        for _ in range(3):
            result = subprocess.run(
                [binaries / "warpdraft", "generate", "--model", folder, "--device", "cuda", "--context", "1024",
                 "--draft", "none", "--temperature", "0", "--ignore-eos", "--max-tokens", "320", "--json",
                 "--file", root / "scripts/gpu-prompt.txt"],
                check=True, capture_output=True, text=True)
            report = json.loads(result.stdout)
            rates.append(report["statistics"]["decode_tokens_per_second"])
            figures["prompt_tokens_per_second"] = report["statistics"]["prompt_tokens_per_second"]
            lap("warpdraft decode")
        print("warpdraft, tok/s:", [round(r, 1) for r in rates])
        figures["decode.m1.tok_s"] = sorted(rates)[1]
        figures["decode.hf_compiled.tok_s"] = transformers_decode_rate(folder, ids[:, :64])
        lap("transformers decode")
        ok &= figures["decode.m1.tok_s"] > figures["decode.hf_compiled.tok_s"]

    args.out.parent.mkdir(parents=True, exist_ok=True)
    figures["gpu"] = torch.cuda.get_device_name()
    args.out.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))
    print("as promised" if ok else "NOT as promised")
    return 0 if ok else 1


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
