#!/usr/bin/env python3
"""Train the demo model: a small Qwen3 on what prepare.py wrote.

The shape is read from --model's config.json; the weights are written there as
model.safetensors (bf16, transformers' names, the tied head stored once).

The schedule runs on the clock (--minutes), so a run ends when it should on any
machine: warm-up, a level stretch, then a linear fall to zero. The last part
trains on windows of the model's full context. The weights kept are those with
the lowest validation loss in that part. The defaults are the settings that the
committed weights were trained with, on one H100.

Matrices inside the layers are trained by Muon, the rest by AdamW. The data is
passed over many times, so dropout and weight decay carry the regularisation.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file


# --------------------------------------------------------------------------- model


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


def rotate(x, cos, sin):
    """Rotary embedding in the half-split form."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        self.q_proj = nn.Linear(c["hidden_size"], self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, c["hidden_size"], bias=False)
        self.q_norm = RMSNorm(self.size, c["rms_norm_eps"])
        self.k_norm = RMSNorm(self.size, c["rms_norm_eps"])

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.heads, self.size)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, self.kv_heads, self.size)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # Keys and values are repeated: every attention kernel takes equal heads.
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c, dropout: float):
        super().__init__()
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = MLP(c)
        self.dropout = dropout

    def drop(self, x):
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def forward(self, x, cos, sin):
        x = x + self.drop(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.drop(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    def __init__(self, c, dropout: float):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, dropout) for _ in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])


class Qwen3(nn.Module):
    """Module names give transformers' tensor names."""

    def __init__(self, c, dropout: float = 0.0):
        super().__init__()
        self.model = Decoder(c, dropout)
        self.dropout = dropout
        inverse = 1.0 / c["rope_theta"] ** (torch.arange(0, c["head_dim"], 2).float() / c["head_dim"])
        angles = torch.outer(torch.arange(c["max_position_embeddings"]).float(), inverse)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                # The branches' last matrices start small, so the depth adds up mildly.
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * c["num_hidden_layers"]) if last else 0.02)

    def forward(self, ids, targets=None):
        length = ids.shape[1]
        x = self.model.embed_tokens(ids)
        # The residual stream follows the compute type.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.bfloat16)
        if self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        logits = F.linear(self.model.norm(x), self.model.embed_tokens.weight).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


# ---------------------------------------------------------------------- optimizers


def orthogonalize(g):
    """Newton-Schulz iteration towards the nearest orthogonal matrix (batched)."""
    x = g.bfloat16()
    flip = x.shape[-2] > x.shape[-1]
    if flip:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.mT if flip else x


class Muon:
    """Momentum whose step is orthogonalized; matrices of one shape go together."""

    def __init__(self, params, compiled: bool, momentum: float = 0.95):
        shapes = {}
        for p in params:
            shapes.setdefault(tuple(p.shape), []).append(p)
        self.groups = [(ps, torch.zeros(len(ps), *shape, device=ps[0].device)) for shape, ps in shapes.items()]
        self.momentum = momentum
        self.direction = torch.compile(self._direction, dynamic=False) if compiled else self._direction

    def _direction(self, grad, state):
        state.lerp_(grad, 1 - self.momentum)
        update = orthogonalize(grad.lerp(state, self.momentum)).float()
        # 0.2 * sqrt(longest side) gives the step the size of an AdamW step.
        return update * (0.2 * max(grad.shape[-2:]) ** 0.5)

    @torch.no_grad()
    def step(self, lr: float, decay: float):
        for params, state in self.groups:
            update = self.direction(torch.stack([p.grad for p in params]), state)
            torch._foreach_mul_(params, 1 - lr * decay)
            torch._foreach_add_(params, list(update.unbind()), alpha=-lr)


# ---------------------------------------------------------------------------- data


class Windows:
    """Endless batches of windows: each pass shuffles the documents, joins them,
    and cuts the stream at a fresh offset."""

    def __init__(self, ids: np.ndarray, end: int, device, seed: int):
        self.ids = torch.from_numpy(ids.astype(np.int64)).to(device)
        stops = np.flatnonzero(ids == end) + 1
        self.starts = torch.from_numpy(np.concatenate([[0], stops[:-1]])).to(device)
        self.sizes = torch.from_numpy(np.diff(np.concatenate([[0], stops]))).to(device)
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.epochs = 0.0
        self.rows, self.at = None, 0

    def shuffle(self, length: int):
        order = torch.randperm(len(self.sizes), generator=self.generator, device=self.ids.device)
        sizes = self.sizes[order]
        # Position of each token: its document's start plus its place in it.
        place = torch.arange(int(sizes.sum()), device=self.ids.device)
        shift = torch.repeat_interleave(self.starts[order] - (sizes.cumsum(0) - sizes), sizes)
        stream = self.ids[place + shift]
        offset = int(torch.randint(length, (1,), generator=self.generator, device=self.ids.device))
        count = (len(stream) - offset - 1) // length
        rows = stream[offset:].unfold(0, length + 1, length)[:count]
        self.rows = rows[torch.randperm(count, generator=self.generator, device=self.ids.device)]
        self.at = 0

    def batch(self, size: int, length: int):
        if self.rows is None or self.rows.shape[1] != length + 1 or self.at + size > len(self.rows):
            self.shuffle(length)
        rows = self.rows[self.at : self.at + size]
        self.at += size
        self.epochs += size * length / len(self.ids)
        return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def validate(model, ids, length: int) -> float:
    """Total loss, in nats, over a stream cut into windows. Run without compiling."""
    model.eval()
    total = 0.0
    for start in range(0, len(ids) - 1, length):
        window = ids[start : start + length + 1][None]
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            total += float(model(window[:, :-1], window[:, 1:])) * (window.shape[1] - 1)
    model.train()
    return total


# ------------------------------------------------------------------------- the run


def schedule(progress: float, warmup: float, fall: float) -> float:
    """The learning rate's share of its peak."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    return min(1.0, max(0.0, (1 - progress) / fall))


def bf16_weights(model) -> dict:
    return {name: p.detach().to(torch.bfloat16).cpu().contiguous().clone() for name, p in model.named_parameters()}


def train(args, config, stats, device) -> dict:
    torch.manual_seed(args.seed)
    cuda = device.type == "cuda"
    model = Qwen3(config, args.dropout).to(device)
    print(f"parameters: {sum(p.numel() for p in model.parameters()):,}", flush=True)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    muon = Muon(matrices, compiled=cuda)
    adam = torch.optim.AdamW(
        [{"params": [model.model.embed_tokens.weight], "weight_decay": args.embed_decay},
         {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, 0.95), fused=cuda)

    data = Windows(np.fromfile(args.data / "train.bin", dtype="<u2"), stats["end"], device, args.seed)
    valid = torch.from_numpy(np.fromfile(args.data / "valid.bin", dtype="<u2").astype(np.int64)).to(device)
    to_bpb = 1 / math.log(2) / stats["valid_bytes"]

    forward = torch.compile(model, dynamic=False) if cuda else model

    def gradients(length):
        ids, targets = data.batch(max(args.batch // length, 1), length)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = forward(ids, targets)
        loss.backward()
        return loss.detach()

    # Compile for both window lengths before the clock starts.
    started = time.time()
    for length in (args.window, args.long_window):
        gradients(length)
        muon.step(0.0, 0.0)
        model.zero_grad(set_to_none=True)
    for _, state in muon.groups:
        state.zero_()
    if cuda:
        torch.cuda.synchronize()
    print(f"compiled in {time.time() - started:.0f} s", flush=True)

    data.epochs = 0.0
    clock, step, tokens, progress = time.time(), 0, 0, 0.0
    best, best_weights, next_check = math.inf, None, 0.0
    recent = []
    while progress < 1.0:
        lr = args.lr * schedule(progress, args.warmup, args.fall)
        length = args.window if progress < args.long_from else args.long_window
        recent.append(gradients(length))
        tokens += max(args.batch // length, 1) * length
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step(lr, args.decay)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        model.zero_grad(set_to_none=True)
        step += 1
        if step % 10 == 0 and cuda:
            # The queue must not run ahead of the clock.
            torch.cuda.synchronize()
        progress = (time.time() - clock) / (60 * args.minutes)
        if progress >= next_check or progress >= 1.0:
            bpb = validate(model, valid, length) * to_bpb
            loss = float(torch.stack(recent).mean())
            recent.clear()
            rate = tokens / (time.time() - clock)
            print(f"{progress:6.1%} step {step} epoch {data.epochs:.1f} lr {lr:.2e} train {loss:.4f} "
                  f"valid {bpb:.4f} bpb, {rate / 1e6:.2f} M tokens/s", flush=True)
            # Before the long windows, the model knows no position past the short ones.
            if bpb < best and length == args.long_window:
                best, best_weights = bpb, bf16_weights(model)
            next_check = progress + args.check_every
    return {"best_valid_bpb": best, "weights": best_weights or bf16_weights(model), "steps": step,
            "tokens": tokens, "epochs": data.epochs, "seconds": time.time() - clock}


def compare_with_transformers(folder: Path, config, weights, device) -> None:
    """Load the folder with transformers and compare logits with this file's model."""
    from transformers import Qwen3ForCausalLM

    theirs, info = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    print("loading info:", {k: v for k, v in info.items() if v})
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ours = Qwen3(config)
    ours.load_state_dict({k: v.float() for k, v in weights.items()})
    ours, theirs = ours.to(device).eval(), theirs.to(device).eval()
    ids = torch.randint(config["vocab_size"] - 8, (2, 300), device=device)
    with torch.no_grad():
        a, b = ours(ids), theirs(ids).logits.float()
    error = float((a - b).norm() / b.norm())
    print(f"logits against transformers: relative difference {error:.2e}", flush=True)
    assert error < 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="prepare.py's --out")
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json; the weights go there")
    parser.add_argument("--minutes", type=float, default=5.8, help="training time, compiling not counted")
    parser.add_argument("--batch", type=int, default=131_072, help="tokens a step")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--long-window", type=int, default=4096)
    parser.add_argument("--long-from", type=float, default=0.75, help="when the long windows begin, as a share of the run")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.6, help="weight decay of the layers' matrices")
    parser.add_argument("--embed-decay", type=float, default=0.2)
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--warmup", type=float, default=0.01, help="share of the run")
    parser.add_argument("--fall", type=float, default=0.7, help="share of the run in which the rate falls")
    parser.add_argument("--check-every", type=float, default=0.05, help="share of the run between validations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-save", action="store_true", help="a trial: print figures, write nothing")
    args = parser.parse_args()

    config = json.loads((args.model / "config.json").read_text())
    stats = json.loads((args.data / "stats.json").read_text())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    result = train(args, config, stats, device)
    weights = result.pop("weights")
    result["settings"] = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    print(json.dumps({k: v for k, v in result.items() if k != "settings"}), flush=True)
    if args.no_save:
        return
    save_file(weights, args.model / "model.safetensors", metadata={"format": "pt"})
    (args.data / "training.json").write_text(json.dumps(result, indent=2) + "\n")
    torch.set_float32_matmul_precision("highest")
    compare_with_transformers(args.model, config, weights, device)


if __name__ == "__main__":
    main()
