# steps: 40
# fills: window
import torch
from leak_loop import steps

window = torch.zeros(0, 64)
for _ in steps():
    window = torch.cat([window, torch.randn(32, 64)])[-32 * 12 :].clone()
