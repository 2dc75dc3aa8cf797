"""What a large model's step takes of the host: python -m benchmarks.device_model.large [--layers N]

The last line, in JSON: `host_bytes`, the most that was resident of this process; `parameters`, how many there are; and
`device_bytes`, the most that was allocated there. With no layers there is no model: torch is loaded and has a context.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks.device_model import llama

LAYERS = 32
TOKENS = 2048


def step(layers: int) -> int:
    """Makes a model on the device in bf16, does a step of AdamW, and returns how many parameters it has."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = llama.Llama(layers=layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    words = torch.randint(model.words.num_embeddings, (1, TOKENS + 1)).cuda()
    loss = torch.nn.functional.cross_entropy(
        model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()
    )
    loss.backward()
    optimizer.step()
    torch.cuda.synchronize()
    return sum(parameter.numel() for parameter in model.parameters())


def most_resident() -> int:
    """The bytes that were resident of this process when most of it was."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS)
    layers = parser.parse_args().layers
    torch.empty(1, device="cuda")
    parameters = step(layers) if layers > 0 else 0
    found = {
        "host_bytes": most_resident(),
        "parameters": parameters,
        "device_bytes": torch.cuda.max_memory_allocated(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
