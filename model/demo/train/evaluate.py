#!/usr/bin/env python3
"""Measure the demo model: bits per byte on the held-out text, beside `xz -9`.

The model is loaded with transformers, as it lies in the folder. The held-out
documents of one kind are joined with <|endoftext|> between them and read in
windows that overlap by half: each token but the first half-window's is scored
with at least half a window before it. All bits are counted, those of the
<|endoftext|> tokens too, over the UTF-8 bytes of the text.

xz gets the same documents joined, as one file (preset 9, its own container).
"""

import argparse
import json
import lzma
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

PROMPTS = [
    "impl<T> Iterator for",
    "/// Returns `true` if",
    "fn main() {\n    let mut v = vec![1, 2, 3];\n",
    "Ownership is",
    "# Error handling\n\nIn Rust,",
    "<|im_start|>user\nWhat does error E0382 mean?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "<|im_start|>user\nWrite a Rust function `is_empty`.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
]


@torch.no_grad()
def stream_bits(model, ids: list[int], start: int, window: int, batch: int) -> float:
    """Bits of a stream, by windows with a stride of half a window. `start`
    stands before the first token (it is not scored)."""
    stream = torch.tensor([start] + ids, device=model.device)
    half, total, spans = window // 2, 0.0, []
    for begin in range(0, max(len(ids) - half, 1), half):
        spans.append((begin, min(begin + window, len(ids))))
    # Only the last span can be short: it goes alone.
    groups = [spans[i : min(i + batch, len(spans) - 1)] for i in range(0, len(spans) - 1, batch)]
    groups.append(spans[-1:])
    for group in groups:
        rows = torch.stack([stream[a : b + 1] for a, b in group])
        logits = model(rows[:, :-1]).logits.float()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(len(group), -1)
        for (begin, _), row in zip(group, losses):
            total += float(row[half if begin else 0 :].double().sum())
    return total / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with heldout.jsonl")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--windows", type=int, nargs="+", default=[4096, 1024])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--new-tokens", type=int, default=120, help="length of the completions; 0: none")
    parser.add_argument("--report", type=Path, help="also write the figures here, as JSON")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, info = Qwen3ForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    model = model.to(device).eval()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")

    with open(args.data / "heldout.jsonl", encoding="utf-8") as file:
        documents = [json.loads(line) for line in file]
    report = {"parameters": sum(p.numel() for p in model.parameters()), "documents": len(documents)}
    sizes, bits = {}, {}
    for kind in ("code", "prose", "all"):
        texts = [d["text"] for d in documents if kind in ("all", d["kind"])]
        data = "".join(texts).encode()
        sizes[kind] = len(data)
        report[kind] = {"bytes": len(data), "xz_bpb": 8 * len(lzma.compress(data, preset=9)) / len(data)}
        if kind == "all":
            continue
        ids = [i for e in tokenizer.encode_batch(texts) for i in [*e.ids, end]]
        report[kind]["tokens"] = len(ids)
        for window in args.windows:
            bits[kind, window] = stream_bits(model, ids, end, window, args.batch)
            report[kind][f"model_bpb_{window}"] = bits[kind, window] / len(data)
    for window in args.windows:
        total = bits["code", window] + bits["prose", window]
        report["all"][f"model_bpb_{window}"] = total / sizes["all"]
    print(json.dumps(report, indent=2), flush=True)

    completions = []
    for prompt in PROMPTS if args.new_tokens else []:
        ids = torch.tensor([tokenizer.encode(prompt).ids], device=device)
        for name, options in (("greedy", {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}),
                              ("sampled", {"do_sample": True})):
            torch.manual_seed(1)
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.new_tokens, **options)
            text = tokenizer.decode(out[0, ids.shape[1]:].tolist(), skip_special_tokens=False)
            completions.append({"prompt": prompt, "how": name, "completion": text})
            print(f"--- {name}: {prompt!r}\n{prompt}\u2588{text}", flush=True)
    if args.report:
        args.report.write_text(json.dumps({**report, "completions": completions}, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
