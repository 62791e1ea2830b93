"""Hello, collective, by PyTorch: nothing of the provider but the backend's name."""

import torch
import torch.distributed as dist

dist.init_process_group("harmonaize")
tensor = torch.full((1024,), float(dist.get_rank()))
dist.all_reduce(tensor)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {tensor[0]:.0f}, by {dist.get_backend()}", flush=True)
dist.destroy_process_group()
