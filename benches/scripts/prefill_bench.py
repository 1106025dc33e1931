#!/usr/bin/env python3
"""Times the kernels for prompts and their peers in turns on one GPU, and prints and writes the medians.

The peers are PyTorch's matrix product (cuBLAS) and its flash scaled_dot_product_attention, at the shapes of Qwen3-8B. A product is
timed as the same job (`plain`: bf16 in, bf16 out, in the tiles that the engine runs) and as the engine runs it, with all that becomes of its
sums, against cuBLAS alone and against cuBLAS and the PyTorch operations that give the same results.

One process of the example `gemm` serves ours; each round asks for every case in a new order, ours and the peer's right after each other,
which goes first by turns, with a pause before each pair so that the card's power limit treats both alike.

    cargo build --release --package benches --example gemm
    benches/scripts/prefill_bench.py --gemm target/release/examples/gemm --out results.json
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time

import torch

# name, epilogue, N, K
LAYERS = [
    ("qkv", "qkv", 6144, 4096),
    ("o", "add", 4096, 4096),
    ("gate, up", "swiglu", 24576, 4096),
    ("down", "add", 4096, 12288),
]
ROTATED_BYTES = 256 << 20


class Ours:
    """host's example, which times what it is asked for."""

    def __init__(self, binary):
        self.process = subprocess.Popen([binary, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, job, repeats):
        self.process.stdin.write(f"{job} {repeats}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"{job}: the example ended")
        return float(answer)


def timed(work, repeats):
    """Microseconds of one call."""
    for i in range(2):
        work(i)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for i in range(repeats):
        work(i)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3 / repeats


def uniform(*shape):
    return (torch.rand(*shape, device="cuda") * 2 - 1).to(torch.bfloat16)


def product(m, n, k):
    x, out = uniform(m, k), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    weights = [uniform(n, k) * 0.1 for _ in range(max(2, ROTATED_BYTES // (n * k * 2)))]
    return lambda i: torch.matmul(x, weights[i % len(weights)].t(), out=out)


def rotated(x, cos, sin):
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def fused(epilogue, m, n, k):
    """The product, and operations that leave what ours does with that epilogue."""
    x, y = uniform(m, k), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    weights = [uniform(n, k) * 0.1 for _ in range(max(2, ROTATED_BYTES // (n * k * 2)))]
    # The residual stream and its norm; queries, keys and values, with cosines and sines; the norm of a head.
    residual, norm = torch.rand(m, n, device="cuda"), torch.rand(n, device="cuda")
    kept = n * 2 // 3
    head_norm = torch.rand(128, device="cuda", dtype=torch.bfloat16)
    cos, sin = (uniform(m, 1, 128) for _ in range(2))
    cache = torch.empty(m, n - kept, device="cuda", dtype=torch.bfloat16)
    functional = torch.nn.functional

    def work(i):
        torch.matmul(x, weights[i % len(weights)].t(), out=y)
        if epilogue == "add":
            residual.add_(y)
            return functional.rms_norm(residual, (n,), norm, 1e-6).to(torch.bfloat16)
        if epilogue == "swiglu":
            return functional.silu(y[:, : n // 2]) * y[:, n // 2 :]
        keys = (n - kept) // 2
        heads = functional.rms_norm(y[:, : kept + keys].view(m, -1, 128), (128,), head_norm, 1e-6)
        heads = rotated(heads, cos, sin).view(m, -1)
        cache[:, :keys].copy_(heads[:, kept:])
        cache[:, keys:].copy_(y[:, kept + keys :])
        return heads

    return work


def attention(tokens):
    q, k, v = (uniform(1, heads, tokens, 128) for heads in (32, 8, 8))
    q *= 3

    def work(_):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return work


def transformers_model():
    """Qwen3-8B's shape with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rope_theta=1e6, tie_word_embeddings=False)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    return model.eval()


def prefill(model, tokens):
    ids = torch.randint(0, 151936, (1, tokens), device="cuda")

    @torch.inference_mode()
    def work(_):
        model(ids, use_cache=True, logits_to_keep=1)

    return work


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemm", required=True, help="the built example")
    parser.add_argument("--out", help="where the figures go as JSON")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cuts", action="store_true", help="also time every way of cutting a product into tiles")
    parser.add_argument("--prefill", action="store_true", help="also time whole prompts, and transformers on them")
    parser.add_argument("--only", help="cases whose name has this")
    arguments = parser.parse_args()

    ours = Ours(arguments.gemm)
    cases = []
    for m in (512, 2048, 8192):
        for name, epilogue, n, k in LAYERS:
            operations = 2 * m * n * k
            cuts = ["auto", "n128", "n256", "2x1", "4x2"] if arguments.cuts else ["auto"]
            cublas = product(m, n, k)
            pairs = [("the same job", "plain", cublas), ("fused, cuBLAS alone", epilogue, cublas),
                     ("fused, and PyTorch", epilogue, fused(epilogue, m, n, k))]
            jobs = [(what, f"gemm {ours} {cut} {m} {n} {k}", peer) for what, ours, peer in pairs for cut in cuts]
            cases.append({"name": f"gemm {name} M={m}", "operations": operations, "jobs": jobs})
    for tokens in (2048, 8192):
        # Causal: half of the products count.
        operations = 4 * tokens * (tokens + 1) // 2 * 128 * 32
        jobs = [("the same job", f"attention {tokens} 32 8", attention(tokens))]
        cases.append({"name": f"attention {tokens}", "operations": operations, "jobs": jobs})

    if arguments.prefill:
        model = transformers_model()
        for tokens in (2048, 8192):
            # Every layer's weights, and causal attention; the head's one row hardly counts.
            operations = 2 * tokens * 36 * 192937984 + 36 * (4 * tokens * (tokens + 1) // 2 * 128 * 32)
            jobs = [("transformers", f"prefill {tokens}", prefill(model, tokens))]
            cases.append({"name": f"prefill {tokens}", "operations": operations, "jobs": jobs, "tokens": tokens})
    cases = [case for case in cases if not arguments.only or arguments.only in case["name"]]

    for round in range(-1, arguments.rounds):
        random.seed(round)
        random.shuffle(cases)
        for case in cases:
            # About 8 ms of work at 600 TFLOP/s; of prompts one, as it meets a card that was idle.
            repeats = max(1, min(200, int(8e-3 * 600e12 / case["operations"])))
            for what, job, other in case["jobs"]:
                time.sleep(0.03)
                peer_first = round % 2 == 0
                peer = timed(other, repeats) if peer_first else None
                torch.cuda.synchronize()
                own = ours(job, repeats)
                if not peer_first:
                    peer = timed(other, repeats)
                if round >= 0:
                    times = case.setdefault("times", {}).setdefault((what, job), ([], []))
                    times[0].append(own)
                    times[1].append(peer)

    rows = []
    for case in sorted(cases, key=lambda c: (c["name"].split()[0], c["operations"])):
        for (what, job), (own, peer) in case["times"].items():
            own_us, peer_us = statistics.median(own), statistics.median(peer)
            ratio = statistics.median(p / o for o, p in zip(own, peer))
            spread = (max(own) - min(own)) / own_us
            rate = case["operations"] / own_us / 1e6
            rows.append({"case": case["name"], "job": job, "against": what, "us": own_us, "peer_us": peer_us,
                         "ratio": ratio, "tflop_s": rate, "spread": spread})
            if "tokens" in case:
                rows[-1]["tok_s"], rows[-1]["peer_tok_s"] = (case["tokens"] / us * 1e6 for us in (own_us, peer_us))
            print(f"{case['name']:22} {what:19} {job:32} {own_us:9.1f} us {rate:6.1f} TFLOP/s  peer {peer_us:9.1f} us"
                  f"  ratio {ratio:.3f}  spread {spread:.3f}"
                  + (f"  {case['tokens'] / own_us * 1e6:.0f} and {case['tokens'] / peer_us * 1e6:.0f} tok/s"
                     if "tokens" in case else ""), flush=True)
    for m in (512, 2048, 8192):
        for what in ("the same job", "fused, cuBLAS alone", "fused, and PyTorch"):
            four = [r for r in rows if r["case"].startswith("gemm") and r["case"].endswith(f"M={m}")
                    and r["against"] == what and " auto " in r["job"]]
            if len(four) == len(LAYERS):
                own, peer = sum(r["us"] for r in four), sum(r["peer_us"] for r in four)
                rows.append({"case": f"gemm, the four together M={m}", "against": what, "us": own, "peer_us": peer,
                             "ratio": peer / own})
                print(f"the four, M={m}: {what:19} {own:9.1f} us  peer {peer:9.1f} us  ratio {peer / own:.3f}")
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": rows}, file, indent=1)


if __name__ == "__main__":
    main()
