"""What an import of 2 GB holds at its peak: the model and the largest shard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 19,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
SHARD = 500_000_000

WRITE = f"""
import sys, torch, zoo
from zoo.hf.recipes import to_stack
zoo.to_hf(zoo.load(to_stack({SHAPE!r}).stack).bfloat16(), sys.argv[1], max_shard_bytes={SHARD})
"""
READ = """
import resource, sys, time
import zoo.hf, zoo.mixers.attention, zoo.ffns.swiglu
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
lm = zoo.from_hf(sys.argv[1])
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size = sum(parameter.numel() * parameter.element_size() for parameter in lm.parameters())
print(size, (peak - before) * 1024, seconds)
"""


@pytest.mark.slow
def test_peak_memory_of_an_import(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    subprocess.run([sys.executable, "-c", WRITE, folder], check=True)
    done = subprocess.run([sys.executable, "-c", READ, folder], check=True, capture_output=True, text=True)
    size, peak, seconds = map(float, done.stdout.split())
    largest = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    sys.stderr.write(f"{size / 1e6:.0f} MB in {seconds:.1f} s, peak {peak / 1e6:.0f} MB above the imports\n")
    assert size > 1.9e9
    assert peak <= size + largest + 50e6
