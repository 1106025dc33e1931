#!/usr/bin/env python3
"""What drafts by an EAGLE-3 head cost, through `warpdraft generate`: the 8B shape and a head of random weights.

Runs on a machine with a GPU of at least 40 GB, with torch and safetensors. The head is always wrong, so acceptance is
scripted: a speed-up is so many tokens a step, times a step without drafts, over one with them. A line for each
measurement, for the weights as they are and as they are packed by default, and the figures as JSON.

- `eagle3.us`: what a draft adds to a step: one with a chain of five less one with a chain of one, a quarter of it.
- `eagle3.chain.speedup`: a chain of five, 3.2 tokens a step; `eagle3.tree.speedup`: a tree of 16 nodes, 4.2 tokens.
- `wrong.ratio`: tokens a second with adaptive drafts ÷ without.
"""

import argparse
import json
import pathlib
import subprocess

import torch
from safetensors.torch import save_file

from parity import SHAPES, make_checkpoint

DRAFT_VOCAB = 32000
TAPS = [2, 18, 33]


def make_head(folder: pathlib.Path, shape: dict) -> None:
    """Writes a head for a model of this shape, as it is published for Qwen3-8B."""
    folder.mkdir(parents=True, exist_ok=True)
    h, inner, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    config = dict(
        architectures=["LlamaForCausalLMEagle3"], model_type="llama", vocab_size=vocab, hidden_size=h,
        intermediate_size=inner, num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu",
        draft_vocab_size=DRAFT_VOCAB, eagle_config=dict(eagle_aux_hidden_state_layer_ids=TAPS))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    torch.manual_seed(2)

    def normal(*size):
        return (torch.randn(*size, device="cuda", dtype=torch.float32) * 0.02).to(torch.bfloat16).cpu()

    ones = torch.ones(h, dtype=torch.bfloat16)
    # The head's token i is the model's 4 · i.
    known = torch.zeros(vocab, dtype=torch.bool)
    known[torch.arange(DRAFT_VOCAB) * 4] = True
    save_file({
        "d2t": torch.arange(DRAFT_VOCAB) * 3, "t2d": known, "fc.weight": normal(h, 3 * h), "norm.weight": ones.clone(),
        "lm_head.weight": normal(DRAFT_VOCAB, h), "midlayer.hidden_norm.weight": ones.clone(),
        "midlayer.input_layernorm.weight": ones.clone(), "midlayer.post_attention_layernorm.weight": ones.clone(),
        "midlayer.mlp.gate_proj.weight": normal(inner, h), "midlayer.mlp.up_proj.weight": normal(inner, h),
        "midlayer.mlp.down_proj.weight": normal(h, inner),
        "midlayer.self_attn.q_proj.weight": normal(heads * 128, 2 * h),
        "midlayer.self_attn.k_proj.weight": normal(kv_heads * 128, 2 * h),
        "midlayer.self_attn.v_proj.weight": normal(kv_heads * 128, 2 * h),
        "midlayer.self_attn.o_proj.weight": normal(h, heads * 128),
    }, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", default="target/release/warpdraft")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/eagle"))
    parser.add_argument("--tokenizer", type=pathlib.Path, default=pathlib.Path("model/demo"))
    parser.add_argument("--tokens", type=int, default=300)
    arguments = parser.parse_args()
    model, head = arguments.work / "model", arguments.work / "head"
    if not (head / "model.safetensors").exists():
        make_checkpoint(model, SHAPES["8b"], arguments.tokenizer)
        make_head(head, SHAPES["8b"])

    def run(weights: str, *flags: str) -> dict:
        command = [arguments.binary, "generate", "--model", str(model), "--device", "cuda", "--json", "--quiet",
                   "--ignore-eos", "--temperature", "0", "--max-tokens", str(arguments.tokens), "--weights", weights,
                   *flags, "fn main() {"]
        best = None
        for _ in range(2):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise SystemExit(done.stderr)
            found = json.loads(done.stdout)["statistics"]
            if best is None or found["decode_seconds"] < best["decode_seconds"]:
                best = found
        best["step"] = best["decode_seconds"] / best["steps"] * 1e6
        print(f"{weights:>6} {best['step']:8.1f} µs a step, {best['mean_accepted_length']:.3f} tokens:",
              *flags, flush=True)
        return best

    for weights in ["plain", "packed"]:
        always = ["--draft", f"eagle3-only:{head}", "--draft-always", "--draft-depth"]
        none = run(weights, "--draft", "none")
        one = run(weights, *always, "1", "--draft-branches", "1", "--draft-tokens", "5")
        chain = run(weights, *always, "5", "--draft-branches", "1", "--draft-tokens", "5")
        tree = run(weights, *always, "5", "--draft-branches", "4", "--draft-tokens", "15")
        wrong = run(weights, "--draft", f"eagle3:{head}")
        print(json.dumps({
            "weights": weights,
            "eagle3.us": round((chain["step"] - one["step"]) / 4, 1),
            "eagle3.chain.speedup": round(3.2 * none["step"] / chain["step"], 3),
            "eagle3.tree.speedup": round(4.2 * none["step"] / tree["step"], 3),
            "wrong.ratio": round(wrong["decode_tokens_per_second"] / none["decode_tokens_per_second"], 4),
        }), flush=True)


if __name__ == "__main__":
    main()
