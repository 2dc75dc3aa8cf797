version: str
torch_version: str
torch_minor: str
torch_cuda: str
