#!/usr/bin/env python3
"""PyTorch's scaled_dot_product_attention and ours (bench/attention.cpp) on this CPU, in turn A B A B.

  pytorch_attention.py --bench PATH [--rounds R] [--threads T] [--clock wall|cpu] [--only TEXT] [--json]

q, k and v are slices of one fused buffer, as in a model; causal, forward and backward. Prints the medians of both over the
rounds and their ratio (above 1: ours is faster). cpu: processor time per thread, for machines shared with other work.
"""
import argparse
import json
import os
import statistics
import subprocess
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads cost no processor time, in both programs

import torch
from torch.nn.functional import scaled_dot_product_attention

SHAPES = {  # name in the benchmark: sequences, tokens, query heads, key/value heads, head size
    "gpt2-4x256": (4, 256, 12, 12, 64),
    "gpt2-4x1024": (4, 1024, 12, 12, 64),
    "d128-1x2048": (1, 2048, 16, 16, 128),
    "gqa-d128-1x2048": (1, 2048, 16, 4, 128),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bench", required=True, help="the program built from bench/attention.cpp")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    p.add_argument("--only", default="", help="part of a name, such as gpt2-4x256.bf16")
    p.add_argument("--json", action="store_true")
    return p.parse_args()


class Peer:
    """One forward and one backward pass through SDPA; returns the seconds of each."""

    def __init__(self, shape, dtype):
        B, T, H, K, D = shape
        self.sizes = [H * D, K * D, K * D]
        self.shape = shape
        self.qkv = torch.randn(B, T, sum(self.sizes)).to(dtype).requires_grad_()
        self.gradient = torch.randn(B, H, T, D).to(dtype)

    def run(self, now):
        B, T, H, K, D = self.shape
        q, k, v = (x.view(B, T, -1, D).transpose(1, 2) for x in self.qkv.split(self.sizes, dim=2))
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        begin = now()
        o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != K)
        middle = now()
        o.backward(self.gradient)
        return middle - begin, now() - middle


def ours(args, name):
    command = [args.bench, "--json", "--rounds", "1", "--threads", str(args.threads), "--clock", args.clock, "--only", name]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = {row["op"]: row for row in map(json.loads, lines)}
    return rows[name + ".forward"]["seconds"], rows[name + ".backward"]["seconds"]


def main():
    args = options()
    torch.set_num_threads(args.threads)
    now = time.perf_counter if args.clock == "wall" else lambda: time.process_time() / args.threads
    for dtype in DTYPES:
        for shape_name, shape in SHAPES.items():
            name = f"{shape_name}.{dtype}"
            if args.only not in name:
                continue
            peer = Peer(shape, DTYPES[dtype])
            peer.run(now)
            repeats = max(1, round(2e9 / (shape[0] * shape[1] ** 2 * shape[2] * shape[4])))
            samples = []
            for _ in range(args.rounds):
                theirs = [statistics.mean(t) for t in zip(*(peer.run(now) for _ in range(repeats)))]
                samples.append((*ours(args, name), *theirs))
            forward, backward, peer_forward, peer_backward = (statistics.median(t) for t in zip(*samples))
            for op, a, b in (("forward", forward, peer_forward), ("backward", backward, peer_backward)):
                row = {"op": f"{name}.{op}", "ours_s": round(a, 6), "pytorch_s": round(b, 6), "ratio": round(b / a, 2)}
                text = f"{row['op']:32} ours {1e3 * a:9.3f} ms   pytorch {1e3 * b:9.3f} ms   ratio {b / a:.2f}"
                print(json.dumps(row) if args.json else text, flush=True)


main()
