#!/usr/bin/env python3
"""Train an EAGLE-3 head for the demo model, on what the model itself says.

Texts are drawn from the model at temperature 1, from <|endoftext|> on, so that no data is needed beside the model. The
head (Li et al., 2025, "EAGLE-3") is one layer that gets a token's embedding and what the model had in its residual
stream one token before, after a few of its layers; it learns what the model says next. As in that paper it learns from
its own hidden states too: a row of the step `j` stands for the `j`-th token of a chain, and sees the keys of the text
as far as the chain's beginning, and those of the chain.

It writes config.json and model.safetensors (bf16, the original's names) to --out. The schedule runs on the clock.

    python3 model/demo/train/eagle.py        # as the committed weights were made, on one H200
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent


def rms_norm(x, weight, eps):
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).type_as(x) * weight.type_as(x)


class Head(torch.nn.Module):
    """The layer, its `fc`, and the output head for the tokens that it knows."""

    def __init__(self, config, inner: int, heads: int, kv_heads: int, known: torch.Tensor, embedding: torch.Tensor):
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        shapes = {
            "fc": (hidden, 3 * hidden),
            "midlayer.self_attn.q_proj": (heads * dim, 2 * hidden),
            "midlayer.self_attn.k_proj": (kv_heads * dim, 2 * hidden),
            "midlayer.self_attn.v_proj": (kv_heads * dim, 2 * hidden),
            "midlayer.self_attn.o_proj": (hidden, heads * dim),
            "midlayer.mlp.gate_proj": (inner, hidden),
            "midlayer.mlp.up_proj": (inner, hidden),
            "midlayer.mlp.down_proj": (hidden, inner),
        }
        norms = ["midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"]
        weights = {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
        weights |= {name: torch.ones(hidden) for name in norms}
        # Whoever says what the model says begins with the model's own head.
        weights["lm_head"] = embedding[known].float().clone()
        for name in ("midlayer.self_attn.o_proj", "midlayer.mlp.down_proj"):
            weights[name] *= 0.1
        self.weights = torch.nn.ParameterDict({name.replace(".", "/"): torch.nn.Parameter(w) for name, w in weights.items()})
        self.dim, self.heads, self.kv_heads, self.eps = dim, heads, kv_heads, config.rms_norm_eps
        self.theta = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]

    def w(self, name: str) -> torch.Tensor:
        return self.weights[name.replace(".", "/")]

    def rotate(self, x, positions):
        half = self.dim // 2
        steps = self.theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = positions[:, None].float() * steps
        cos, sin = (f(angles)[None, :, None, :].type_as(x) for f in (torch.cos, torch.sin))
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def chain(self, embedded, states, steps: int):
        """Logits of `steps` steps for rows [batch, rows]. Row `p` of step `j` has the token after position `p`, and the
        hidden state of position `p`: of the model in step 0, and in later ones that of row `p - 1` of the step before."""
        batch, rows, _ = embedded.shape
        positions = torch.arange(rows, device=embedded.device)
        heads = lambda x, n: x.view(batch, rows, n, self.dim)
        hidden = F.linear(states, self.w("fc"))
        normed = rms_norm(embedded, self.w("midlayer.input_layernorm"), self.eps)
        of = lambda name: self.w(f"midlayer.{name}")
        keys, values = [], []
        for j in range(steps):
            pairs = torch.cat([normed, rms_norm(hidden, of("hidden_norm"), self.eps)], -1)
            q = self.rotate(heads(F.linear(pairs, of("self_attn.q_proj")), self.heads), positions)
            k = self.rotate(heads(F.linear(pairs, of("self_attn.k_proj")), self.kv_heads), positions)
            v = heads(F.linear(pairs, of("self_attn.v_proj")), self.kv_heads)
            group = self.heads // self.kv_heads
            keys.append(k.repeat_interleave(group, 2))
            values.append(v.repeat_interleave(group, 2))
            scores = torch.einsum("bqhd,bkhd->bhqk", q, keys[0]) * self.dim**-0.5
            # The text, up to where the chain begins; then the chain's rows, one of each step.
            scores = scores.masked_fill(positions[None, :] > positions[:, None] - j, -math.inf)
            for i in range(1, j + 1):
                own = (q * keys[i].roll(j - i, 1)).sum(-1) * self.dim**-0.5
                scores = torch.cat([scores, own.transpose(1, 2)[..., None]], -1)
            # Rows before the chain's beginning see nothing; what they say counts nowhere.
            scores[:, :, :j, 0] = 0
            shares = scores.float().softmax(-1).type_as(q)
            out = torch.einsum("bhqk,bkhd->bqhd", shares[..., :rows], values[0])
            for i in range(1, j + 1):
                out = out + shares[..., rows + i - 1].transpose(1, 2)[..., None] * values[i].roll(j - i, 1)
            x = hidden + F.linear(out.reshape(batch, rows, -1), of("self_attn.o_proj"))
            y = rms_norm(x, of("post_attention_layernorm"), self.eps)
            y = F.silu(F.linear(y, of("mlp.gate_proj"))) * F.linear(y, of("mlp.up_proj"))
            x = x + F.linear(y, of("mlp.down_proj"))
            yield F.linear(rms_norm(x, self.w("norm"), self.eps), self.w("lm_head"))
            hidden = x.roll(1, 1)


@torch.no_grad()
def texts(model, count: int, length: int, at_once: int) -> torch.Tensor:
    """Texts that the model says, [count, length]."""
    found = []
    for first in range(0, count, at_once):
        start = torch.full((min(at_once, count - first), 1), model.config.eos_token_id, device=model.device)
        # A text may end, and another begin.
        out = model.generate(start, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=length - 1,
                             min_new_tokens=0, eos_token_id=-1, pad_token_id=0)
        found.append(out)
    return torch.cat(found)


def write(head: Head, out: Path, config, taps: list[int], known: torch.Tensor, inner: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {f"{name.replace('/', '.')}.weight": w.detach().bfloat16().cpu().contiguous() for name, w in head.weights.items()}
    known = known.cpu()
    tensors["d2t"] = known - torch.arange(len(known))
    tensors["t2d"] = torch.isin(torch.arange(config.vocab_size), known)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": inner, "num_hidden_layers": 1,
        "num_attention_heads": head.heads, "num_key_value_heads": head.kv_heads, "head_dim": head.dim,
        "max_position_embeddings": config.max_position_embeddings, "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": head.theta, "hidden_act": "silu", "draft_vocab_size": len(known),
        # They name a layer by its output.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]},
    }, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=HERE.parent)
    parser.add_argument("--out", type=Path, default=HERE.parent / "eagle3")
    parser.add_argument("--minutes", type=float, default=3.3, help="of training")
    parser.add_argument("--texts", type=int, default=8192, help="drawn from the model, of 512 tokens each")
    parser.add_argument("--at-once", type=int, default=2048, help="texts drawn at once")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5, help="length of the chains that are learnt from")
    parser.add_argument("--draft-vocab", type=int, default=1536)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen3ForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(device).eval()
    config, begun = model.config, time.time()
    data = texts(model, args.texts, args.length, args.at_once)
    print(f"{data.numel()} tokens drawn in {time.time() - begun:.0f} s", flush=True)
    counts = torch.bincount(data.flatten(), minlength=config.vocab_size)
    known = counts.topk(args.draft_vocab).indices.sort().values
    print(f"{len(known)} tokens are {counts[known].sum() / counts.sum():.4f} of the texts")
    embedding = model.get_input_embeddings().weight.detach()
    taps = [2, 4, config.num_hidden_layers]
    head = Head(config, args.inner, 4, 2, known, embedding).to(device)
    matrices = [w for w in head.parameters() if w.dim() == 2]
    vectors = [w for w in head.parameters() if w.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=args.lr, betas=(0.9, 0.95))
    # The residual stream after each layer; the last one that transformers gives is normed.
    streams = {}
    for tap in taps:
        model.model.layers[tap - 1].register_forward_hook(
            lambda _, __, out, tap=tap: streams.__setitem__(tap, out[0] if isinstance(out, tuple) else out))
    begun, step, last = time.time(), 0, 0.0
    while (done := (time.time() - begun) / (60 * args.minutes)) < 1:
        rate = min(1, step / 100) * min(1, (1 - done) / 0.5)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * max(rate, 1e-3)
        tokens = data[torch.randint(len(data), (args.batch,), device=data.device)]
        with torch.no_grad():
            logits = model(tokens).logits[:, 1:]
            states = torch.cat([streams[tap] for tap in taps], -1)[:, :-1]
            wanted = logits[..., known].float().softmax(-1)
            # Of what the head does not know it learns nothing.
            counted = torch.isin(logits.argmax(-1), known).float()
            best = logits[..., known].argmax(-1)
        loss, right = 0.0, []
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            for j, said in enumerate(head.chain(F.embedding(tokens[:, 1:], embedding).float(), states.float(), args.steps)):
                said = said.float()
                each = -(wanted * said.log_softmax(-1)).sum(-1)[:, j:]
                loss = loss + 0.9**j * (each * counted[:, j:]).sum() / counted[:, j:].sum()
                right.append(((said.argmax(-1) == best).float() * counted)[:, j:].mean())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        if time.time() - last > 15:
            last = time.time()
            shares = " ".join(f"{share.item():.3f}" for share in right)
            print(f"{done:.2f} step {step} loss {loss.item():.3f} right {shares}", flush=True)
    write(head, args.out, config, taps, known, args.inner)
    print(f"{step} steps; {(args.out / 'model.safetensors').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
