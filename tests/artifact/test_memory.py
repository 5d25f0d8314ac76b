"""Models that are larger than the memory: mapped from disk, compressed, saved and loaded tensor by tensor."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import json, resource, sys
import torch
from torch import nn
from bitwright.artifact import Artifact
from bitwright.quantization import Quantizer, QuantizerConfig

folder, layers, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = QuantizerConfig.presets.w8(execution_mode="eager")

def mapped(index):
    path = f"{folder}/{index}.bin"
    torch.randn(size, size).numpy().tofile(path)
    return nn.Parameter(torch.from_file(path, shared=True, size=size * size).view(size, size), requires_grad=False)

def prepared(count):
    net = nn.Sequential(*(nn.Linear(size, size, bias=False, device="meta") for _ in range(count)))
    for index, layer in enumerate(net):
        layer.weight = mapped(index)
    return Quantizer(net, config).prepare((torch.zeros(1, size),))

def save_and_load(model, name):
    Artifact.from_model(model, lazy=True).save(f"{folder}/{name}", shard_bytes=8 * size * size)
    loaded = Artifact.load(f"{folder}/{name}")
    return all(torch.equal(loaded.decode(f"{i}.weight"), layer.weight) for i, layer in enumerate(model)), loaded.nbytes

save_and_load(prepared(1), "first")  # imports and compiles what is needed once
model = prepared(layers)
used = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) * 1024
allowed = 12_000_000
resource.setrlimit(resource.RLIMIT_DATA, (used + allowed, used + allowed))
equal, packed = save_and_load(model, "all")
print(json.dumps({"equal": equal, "dense": layers * size * size * 4, "packed": packed, "allowed": allowed}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are set as Linux has them")
def test_a_model_larger_than_the_memory_limit(tmp_path):
    """With room for less than the packed weights: saved, loaded and decoded, each weight right."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path), "256", "256"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"]
    assert found["allowed"] < 0.8 * found["packed"] < 0.3 * found["dense"]
