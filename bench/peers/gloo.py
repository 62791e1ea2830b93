"""One rank of torch.distributed with Gloo: AllReduce (sum) of f32 in place, timed; rank 0 prints a line of JSON.

Usage: gloo.py STORE RANK RANKS BYTES WARMUP ITERATIONS (STORE: a file that does not exist yet, the same for all ranks)
"""

import json
import sys
import time
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def main():
    store, rank, ranks, size, warmup, iterations = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    tensor = torch.full((size // 4,), float(rank + 1), dtype=torch.float32)
    dist.all_reduce(tensor)
    wrong = int((tensor != ranks * (ranks + 1) / 2).sum())
    # Zeros stay zeros, however often they are added.
    tensor.fill_(0.0)
    for _ in range(warmup):
        dist.all_reduce(tensor)
    dist.barrier()
    times = []
    for _ in range(iterations):
        began = time.perf_counter_ns()
        dist.all_reduce(tensor)
        times.append((time.perf_counter_ns() - began) / 1e3)
    dist.barrier()
    if rank == 0:
        print(json.dumps({"times_us": times, "wrong": wrong}), flush=True)
    dist.destroy_process_group()


main()
