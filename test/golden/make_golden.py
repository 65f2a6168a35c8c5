#!/usr/bin/env python3
"""Makes the golden files: tiny random models, and what Hugging Face transformers on PyTorch says about them.

Run by hand where torch, transformers and safetensors are installed; tests read the files only.

    python3 test/golden/make_golden.py [--out test/golden/hf]

For each family (GPT-2, Llama, Mistral, Qwen2), in fp32 with eager attention, the folder OUT/FAMILY holds
    config.json, model.safetensors   as transformers saves them
    tokens.bin                       llm.c token file, enough for 20 steps of BATCH sequences
    train.json                       the training settings, as a Trifold config
    expected.safetensors             losses[10], grad_norms[10] (before clipping), grad/NAME: gradient of the first step's mean
                                     loss before clipping, param/NAME: parameters after 10 AdamW steps. A tied head is left out.
OUT/llama-sharded is llama again in two safetensors files with an index, and with the config.json of transformers 4
(rope_theta and rope_scaling at the top), which most published models have.
OUT/golden.json records versions, hashes, and how far this fp32 run lies from the same computation in fp64. That distance says
why GPT-2 has eps 1e-5: the gradient of its key bias is zero in exact arithmetic, and with eps 1e-8 Adam turns the rounding noise
(norm 2e-8) into steps, so that the fused c_attn.bias of two correct runs differs by 1.2e-3. With 1e-5 it is 1.3e-6, and the place
of eps in the formula is tested as well. The other families keep 1e-8.

Sample i is tokens [i*seq, i*seq + seq] (seq + 1 tokens, overlapping by one); batch k takes samples k*BATCH ... k*BATCH+BATCH-1.
"""
import argparse
import hashlib
import json
import pathlib
import platform
import shutil

import numpy as np
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

BATCH, STEPS, DATA_STEPS = 2, 10, 20
OPTIM = {"name": "adamw", "lr": 1e-3, "schedule": "constant", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1,
         "clip": 1.0}
NO_SPECIAL = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)

# Odd on purpose: vocabularies that are no multiple of anything, head_dim 12, head_dim * heads != hidden, sequences that
# end inside a tile. Llama: wavelengths 2*pi*10000^(i/8) against 64/4 and 64/1 fall into all three regimes of llama3 scaling.
FAMILIES = {
    "gpt2": (37, GPT2Config(n_layer=2, n_embd=48, n_head=4, vocab_size=211, n_positions=48, activation_function="gelu_new",
                            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **NO_SPECIAL)),
    "llama": (96, LlamaConfig(num_hidden_layers=2, hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                              intermediate_size=80, vocab_size=211, max_position_embeddings=512, rms_norm_eps=1e-5,
                              tie_word_embeddings=False, hidden_act="silu",
                              rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                                               "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                               "original_max_position_embeddings": 64}, **NO_SPECIAL)),
    "mistral": (83, MistralConfig(num_hidden_layers=2, hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                                  intermediate_size=72, vocab_size=131, max_position_embeddings=128, rms_norm_eps=1e-5,
                                  sliding_window=21, tie_word_embeddings=False, hidden_act="silu", **NO_SPECIAL)),
    "qwen2": (61, Qwen2Config(num_hidden_layers=2, hidden_size=48, num_attention_heads=4, num_key_value_heads=1,
                              intermediate_size=88, vocab_size=211, max_position_embeddings=128, rms_norm_eps=1e-6,
                              tie_word_embeddings=True, use_sliding_window=False, hidden_act="silu", **NO_SPECIAL)),
}


def make_model(config):
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return model.eval()  # no dropout; gradients flow all the same


def randomise(model, seed):
    """Generic values everywhere: peaked attention, logits far from uniform, no norm at one and no bias at zero."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=g)
            p.copy_(0.2 * noise if p.dim() == 2 or name.endswith("bias") else 1 + 0.3 * noise)


def make_tokens(vocab, count, seed):
    """A first-order Markov chain (four likely successors each), so that there is something to learn."""
    g = torch.Generator().manual_seed(seed)
    successors = torch.randint(vocab, (vocab, 4), generator=g)
    tokens = [int(torch.randint(vocab, (1,), generator=g))]
    while len(tokens) < count:
        choice = int(torch.randint(5, (1,), generator=g))
        tokens.append(int(successors[tokens[-1], choice]) if choice < 4 else int(torch.randint(vocab, (1,), generator=g)))
    return torch.tensor(tokens)


def write_llmc(path, tokens):
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.numpy().astype("<u2").tobytes())


def batch_of(tokens, seq, step):
    first = [(step * BATCH + b) * seq for b in range(BATCH)]
    return torch.stack([tokens[i:i + seq] for i in first]), torch.stack([tokens[i + 1:i + seq + 1] for i in first])


def train(model, tokens, seq, optim):
    """The first step's gradients, STEPS losses and gradient norms, and the parameters after STEPS steps."""
    named = dict(model.named_parameters())  # a tied head appears once
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": optim["weight_decay"]},
         {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0}],
        lr=optim["lr"], betas=(optim["beta1"], optim["beta2"]), eps=optim["eps"], foreach=False)
    losses, norms, grads = [], [], None
    for step in range(STEPS):
        x, y = batch_of(tokens, seq, step)
        loss = F.cross_entropy(model(input_ids=x, use_cache=False).logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        if grads is None:
            grads = {n: p.grad.clone() for n, p in named.items()}
        # By hand: clip_grad_norm_ divides by norm + 1e-6, Trifold by the norm.
        norm = torch.sqrt(sum(p.grad.double().square().sum() for p in named.values())).item()
        if norm > optim["clip"]:
            for p in named.values():
                p.grad.mul_(optim["clip"] / norm)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm)
    return {"losses": torch.tensor(losses, dtype=torch.float64), "grad_norms": torch.tensor(norms, dtype=torch.float64),
            **{f"grad/{n}": g for n, g in grads.items()}, **{f"param/{n}": p.detach().clone() for n, p in named.items()}}


def noise(fp32, fp64):
    """Largest relative Frobenius distance between the fp32 and fp64 runs: the reference's own rounding."""
    def worst(kind):
        total = torch.sqrt(sum(t.double().square().sum() for n, t in fp64.items() if n.startswith(kind)))
        return max(((fp32[n].double() - t).norm() / (t.norm() + 1e-3 * total)).item()
                   for n, t in fp64.items() if n.startswith(kind))
    return {"loss": ((fp32["losses"] - fp64["losses"]).abs() / fp64["losses"]).max().item(),
            "grad": worst("grad/"), "param": worst("param/")}


def check_window(window=3, seq=8):
    """Token i must see exactly the tokens j with 0 <= i - j < window."""
    config = MistralConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
                           intermediate_size=16, vocab_size=17, sliding_window=window, **NO_SPECIAL)
    model = make_model(config)
    randomise(model, 1)
    x = torch.randn(1, seq, 16, requires_grad=True)
    logits = model(inputs_embeds=x, use_cache=False).logits
    for i in range(seq):
        seen = torch.autograd.grad(logits[0, i].sum(), x, retain_graph=True)[0][0].abs().sum(-1) > 0
        assert seen.tolist() == [0 <= i - j < window for j in range(seq)], f"token {i} sees {seen.tolist()}"


def transformers4_config(config):
    """config.json as transformers 4 wrote it: rope settings at the top level, torch_dtype instead of dtype."""
    old = dict(config)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = rope
    old["torch_dtype"] = old.pop("dtype", "float32")
    old["transformers_version"] = "4.43.0"
    return old


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "hf")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    check_window()
    shutil.rmtree(out, ignore_errors=True)
    families = {}
    for seed, (family, (seq, config)) in enumerate(FAMILIES.items(), start=10):
        folder = out / family
        model = make_model(config)
        randomise(model, seed)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        if family == "llama":
            model.save_pretrained(out / "llama-sharded", max_shard_size="140KB")
            (out / "llama-sharded" / "generation_config.json").unlink(missing_ok=True)
            old = transformers4_config(json.loads((folder / "config.json").read_text()))
            (out / "llama-sharded" / "config.json").write_text(json.dumps(old, indent=2) + "\n")
        tokens = make_tokens(config.vocab_size, DATA_STEPS * BATCH * seq + 1, seed)
        write_llmc(folder / "tokens.bin", tokens)
        double = make_model(config)
        double.load_state_dict(model.state_dict())
        optim = {**OPTIM, "eps": 1e-5 if family == "gpt2" else OPTIM["eps"]}
        settings = {"train": {"seq": seq, "micro_batch": BATCH, "global_batch": BATCH, "steps": STEPS, "dtype": "fp32"},
                    "optim": optim, "data": {"shuffle": False}}
        (folder / "train.json").write_text(json.dumps(settings, indent=1) + "\n")
        expected = train(model, tokens, seq, optim)
        rounding = noise(expected, train(double.double(), tokens, seq, optim))
        safetensors.torch.save_file(expected, folder / "expected.safetensors")
        families[family] = {"fp32_against_fp64": rounding}
        print(f"{family:8} loss {expected['losses'][0]:.4f} -> {expected['losses'][-1]:.4f}  grad norm "
              f"{expected['grad_norms'][0]:.3f}  against fp64: {rounding}")
    files = sorted(p for p in out.rglob("*") if p.is_file())
    for p in files:
        p.chmod(0o644)  # safetensors writes 0600
    record = {
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
                     "safetensors": safetensors.__version__},
        "families": families,
        "sha256": {str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files},
    }
    (out / "golden.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{sum(p.stat().st_size for p in files) / 1e6:.2f} MB in {out}")


if __name__ == "__main__":
    main()
