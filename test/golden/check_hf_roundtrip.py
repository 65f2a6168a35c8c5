#!/usr/bin/env python3
"""Checks `trifold export` and --init.from against transformers. Run by hand where transformers and torch are installed:

    python3 test/golden/check_hf_roundtrip.py build/trifold

For each family, transformers writes a tiny random model; trifold takes its weights with --init.from, saves a checkpoint without
training, and exports it in fp32 and bf16. transformers loads every export with nothing missing or left over, all tensors are
equal, and so are the logits. The configurations must agree in every key that the export writes.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

NONE = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
SHAPE = dict(vocab_size=211, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=80, max_position_embeddings=64, **NONE)
GPT2 = dict(vocab_size=211, n_embd=48, n_layer=3, n_head=4, n_positions=64, **NONE)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
MODELS = {
    "gpt2": GPT2Config(**GPT2),
    "gpt2-erf-untied": GPT2Config(**GPT2, activation_function="gelu", n_inner=100, tie_word_embeddings=False),
    "llama": LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "llama-linear-tied": LlamaConfig(**SHAPE, head_dim=16, tie_word_embeddings=True,
                                     rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=10000.0)),
    "llama-biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SHAPE, head_dim=16, sliding_window=7),
    "mistral-full": MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2-window": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=0),
    "qwen2-layers": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5,
                                layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
}


def run(*args):
    result = subprocess.run(args, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, args))}\nexit code {result.returncode}\n{result.stdout}{result.stderr}")


def load(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="eager", output_loading_info=True)
    problems = {key: value for key, value in info.items() if value}
    assert not problems, problems
    return model.eval()


def check(name, config, trifold, folder):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():  # biases and norms too, so that none can be mistaken for another
            p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(folder / "theirs")
    run(trifold, "train", f"--init.from={folder / 'theirs'}", f"--run.dir={folder / 'run'}", "--train.steps=0",
        f"--data.train={folder / 'tokens.bin'}", "--train.seq=16", "--run.device=cpu", "--train.dtype=fp32", "--checkpoint.resume=none")
    tokens = torch.arange(48).reshape(2, 24) * 7 % config.vocab_size
    for dtype in ("fp32", "bf16"):
        out = folder / dtype
        run(trifold, "export", folder / "run", "--to", out, "--format", "hf", "--dtype", dtype, "--file-bytes", "60000")
        ours, expected = load(out), model
        if dtype == "bf16":
            expected = AutoModelForCausalLM.from_pretrained(folder / "theirs", dtype=torch.bfloat16, attn_implementation="eager").eval()
        ours_state, expected_state = ours.state_dict(), expected.state_dict()
        assert ours_state.keys() == expected_state.keys()
        for key, value in expected_state.items():
            assert ours_state[key].dtype == value.dtype and torch.equal(ours_state[key], value), key
        with torch.no_grad():
            assert torch.equal(ours(tokens).logits, expected(tokens).logits)
        written = json.loads((out / "config.json").read_text()).keys()
        a, b = AutoConfig.from_pretrained(out).to_dict(), config.to_dict()
        for key in written - {"dtype", "torch_dtype", "architectures", "model_type", "rope_theta", "rope_scaling"}:
            if key.endswith("_pdrop") or key == "max_window_layers":  # trifold has no dropout; layer_types decides
                continue
            if key in b or a[key] is not None:
                assert a[key] == b.get(key, a[key]), (key, a[key], b.get(key))
        if config.model_type != "gpt2":
            assert a["rope_parameters"] == b["rope_parameters"], (a["rope_parameters"], b["rope_parameters"])
    print(f"{name}: {len(expected_state)} tensors equal, logits equal")


def write_tokens(path, count):
    header = [0] * 256
    header[:3] = 20240520, 1, count
    path.write_bytes(b"".join(x.to_bytes(4, "little") for x in header) + bytes(2 * count))


def main():
    trifold = pathlib.Path(sys.argv[1]).resolve()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_tokens(pathlib.Path(folder) / "tokens.bin", 2000)
            check(name, config, trifold, pathlib.Path(folder))


if __name__ == "__main__":
    main()
