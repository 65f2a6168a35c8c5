#!/usr/bin/env python3
"""Training steps of GPT-2 and Llama in PyTorch, the peer of scripts/bench.sh and scripts/gpu_check.sh: same model, same shapes, same kind of
optimizer step.

Written the way a PyTorch user would write a fast trainer: fused qkv, F.scaled_dot_product_attention, fused AdamW, set_to_none
gradients, optionally torch.compile. Tokens are random, since only speed is compared. Prints one JSON object on standard
output; messages go to standard error.

    pytorch_train.py --batch 4 --seq 256 --dtype bf16 --compile --threads 2 --warmup 2 --steps 5
    pytorch_train.py --family llama --layers 8 --hidden 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256 ...

dtype     fp32; bf16: autocast with fp32 weights (what is compared); bf16-weights: everything bf16 without master weights
          (not equivalent in numerics, for orientation only)
wall_s    one number per measured step. cpu_s_per_step is the process's CPU time, which a busy machine disturbs less.
"""
import argparse
import collections
import json
import os
import platform
import re
import resource
import statistics
import sys
import time

PROCESS_START = time.time() - time.process_time()  # close to the exec: nothing has waited yet

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(C, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, layers, hidden, heads, vocab, max_seq):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(max_seq, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.wte.weight)  # tied head
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LlamaBlock(nn.Module):
    def __init__(self, hidden, heads, kv_heads, ffn):
        super().__init__()
        self.head, self.heads, self.kv_heads = hidden // heads, heads, kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.head, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up, self.down = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        parts = self.qkv(self.norm1(x)).view(B, T, -1, self.head).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.kv_heads, self.kv_heads], 1)
        rotate = lambda t: t * cos + torch.cat((-t[..., self.head // 2:], t[..., :self.head // 2]), -1) * sin
        a = F.scaled_dot_product_attention(rotate(q).to(v.dtype), rotate(k).to(v.dtype), v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.out(a.transpose(1, 2).reshape(B, T, C))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, layers, hidden, heads, kv_heads, ffn, vocab, max_seq, theta=500000.0):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab, bias=False)
        self.blocks = nn.ModuleList(LlamaBlock(hidden, heads, kv_heads, ffn) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        size = hidden // heads
        angles = torch.outer(torch.arange(max_seq), theta ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x, T = self.embedding(tokens), tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:T], self.sin[:T])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def parse():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--batch", type=int, default=4, help="sequences per step")
    p.add_argument("--seq", type=int, default=256)
    p.add_argument("--dtype", choices=["fp32", "bf16", "bf16-weights"], default="fp32")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--compile", action="store_true", help="torch.compile (needs a C++ compiler)")
    p.add_argument("--compile-mode", default="default", help="mode of torch.compile")
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--warmup", type=int, default=2, help="steps that are not measured")
    p.add_argument("--steps", type=int, default=5, help="measured steps")
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--hidden", type=int, default=768)
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--family", choices=["gpt2", "llama"], default="gpt2")
    p.add_argument("--kv-heads", type=int, help="llama; default: heads")
    p.add_argument("--ffn", type=int, help="llama; default: 4 * hidden")
    p.add_argument("--vocab", type=int, default=50304, help="50257 padded, which is faster")
    p.add_argument("--max-seq", type=int, default=1024)
    p.add_argument("--seed", type=int, default=1234)
    p.add_argument("--profile", action="store_true", help="add the share of each kind of operation")
    return p.parse_args()


def make_optimizer(model):
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    kw = dict(lr=6e-4, betas=(0.9, 0.95), eps=1e-8)
    try:
        return torch.optim.AdamW(groups, fused=True, **kw), "fused"
    except RuntimeError:
        return torch.optim.AdamW(groups, foreach=True, **kw), "foreach"


def blas_name():
    settings = torch.__config__.show()
    blas = re.search(r"BLAS_INFO=(\w+)", settings)
    libraries = [line.strip(" -") for line in settings.splitlines()
                 if any(word in line for word in ("Math Kernel", "MKL-DNN", "OpenBLAS"))]
    return {"blas": blas.group(1) if blas else "unknown", "libraries": libraries, "mkl": torch.backends.mkl.is_available(),
            "onednn": torch.backends.mkldnn.is_available(), "capability": torch.backends.cpu.get_cpu_capability()}


# First match wins. Eager names are aten operators; compiled ones carry the operators that were fused.
KINDS = [
    ("attention", ("scaled_dot_product", "flash_attention")),
    ("matmul", ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn_linear", "mkl_linear", "linear_pointwise", "aten::linear",
                "aten::matmul", "packed_gemm", "packed_linear", "mm_")),
    ("optimizer", ("adamw", "_foreach", "linalg_vector_norm", "clip", "Optimizer", "aten::stack")),
    ("cross_entropy", ("softmax", "nll_loss", "cross_entropy")),
    ("norm", ("layer_norm", "rms_norm")),
    ("activation", ("gelu", "tanh", "silu")),
    ("embedding", ("embedding", "index_put")),
    ("cast_copy", ("aten::copy_", "aten::to", "aten::_to_copy", "aten::clone")),
    ("add_sum", ("aten::add", "aten::sum")),
]


def profile_shares(step):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        step()
    shares, names = collections.Counter(), collections.Counter()
    for e in prof.key_averages():
        kind = next((k for k, words in KINDS if any(w in e.key for w in words)), "other")
        shares[kind] += e.self_cpu_time_total
        names[e.key] += e.self_cpu_time_total
    total = sum(shares.values())
    return {"shares": {k: round(v / total, 4) for k, v in shares.most_common()},
            "top": {k[:90]: round(v / total, 4) for k, v in names.most_common(16)}}


def main():
    a = parse()
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    if a.family == "gpt2":
        model = Gpt2(a.layers, a.hidden, a.heads, a.vocab, a.max_seq).to(a.device)
    else:
        model = Llama(a.layers, a.hidden, a.heads, a.kv_heads or a.heads, a.ffn or 4 * a.hidden, a.vocab, a.max_seq).to(a.device)
    if a.dtype == "bf16-weights":
        model = model.to(torch.bfloat16)
    optimizer, optimizer_kind = make_optimizer(model)
    if a.profile and a.compile:
        import torch._inductor.config as inductor
        inductor.cpp.enable_kernel_profile = True
        inductor.cpp.descriptive_names = "original_aten"
    run_model = torch.compile(model, mode=a.compile_mode) if a.compile else model
    params = list(model.parameters())

    def step():
        data = torch.randint(0, min(a.vocab, 50257), (a.batch, a.seq + 1), device=a.device)
        with torch.autocast(a.device, dtype=torch.bfloat16, enabled=a.dtype == "bf16"):
            loss = run_model(data[:, :-1], data[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    losses, wall, cpu, first_step_s = [], [], [], None
    for i in range(a.warmup + a.steps):
        wall0, cpu0 = time.perf_counter(), time.process_time()
        losses.append(step())
        if i == 0:
            first_step_s = time.time() - PROCESS_START
        if i >= a.warmup:
            wall.append(time.perf_counter() - wall0)
            cpu.append(time.process_time() - cpu0)
        wall_s, cpu_s = time.perf_counter() - wall0, time.process_time() - cpu0
        print(f"step {i + 1} loss {losses[-1]:.4f} {wall_s:.3f} s, {cpu_s:.3f} CPU s", file=sys.stderr)
    tokens = a.batch * a.seq
    result = {
        "peer": "pytorch", "torch": torch.__version__, "python": platform.python_version(), **blas_name(),
        "compiled": a.compile, "compile_mode": a.compile_mode if a.compile else None, "dtype": a.dtype,
        "optimizer": optimizer_kind, "batch": a.batch, "seq": a.seq, "vocab": a.vocab, "threads": torch.get_num_threads(),
        "params": sum(p.numel() for p in params), "warmup": a.warmup, "steps": a.steps,
        "median_step_s": statistics.median(wall), "best_step_s": min(wall), "wall_s": wall,
        "tokens_per_s": tokens / statistics.median(wall),
        "cpu_s_per_step": statistics.median(cpu), "tokens_per_cpu_s": tokens / statistics.median(cpu),
        "first_loss": losses[0], "last_loss": losses[-1], "start_to_first_step_s": first_step_s,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if a.device == "cuda":
        result["gpu"], result["peak_gpu_bytes"] = torch.cuda.get_device_name(), torch.cuda.max_memory_allocated()
    if a.profile:
        result["profile"] = profile_shares(step)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
