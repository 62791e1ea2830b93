"""AllReduces of CUDA's tensors by several backends of torch.distributed in turn, all ranks on the first GPU.

Usage: gpu.py RANK RANKS PORT BACKEND[,BACKEND...], as many processes at once as there are ranks. HARMONAIZE_SOCKETS names the sockets of
two agents: the first half of the ranks takes the first, the other half the other. The first rank prints JSON: of each size in bytes, by
backend, the median, the least and the most of five runs' means, in microseconds. docs/performance/torch.md says more.
"""

import json
import os
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

# Bytes, and calls in a run.
SIZES = {1 << 10: 200, 1 << 20: 30, 1 << 26: 8}
RUNS = 5


def seconds(tensor, calls, group):
    """Of a call, when none waits for the one before."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def measured(size, calls, groups):
    times = {name: [] for name in groups}
    for run in range(1 + RUNS):
        for name, group in groups.items():
            tensor = torch.ones(size // 4, device="cuda")
            dist.all_reduce(tensor, group=group)
            if not tensor.eq(dist.get_world_size()).all():
                raise SystemExit(f"{name}: a wrong sum")
            took = seconds(tensor, calls, group)
            # The first warms up.
            if run:
                times[name].append(took * 1e6)
    return {name: [round(of(all), 1) for of in (statistics.median, min, max)] for name, all in times.items()}


def main():
    rank, ranks, port = map(int, sys.argv[1:4])
    sockets = os.environ["HARMONAIZE_SOCKETS"].split(",")
    os.environ.update(HARMONAIZE_SOCKET=sockets[rank * len(sockets) // ranks], HARMONAIZE_JOB=f"cuda-{port}")
    torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
    names = sys.argv[4].split(",")
    dist.init_process_group(names[0], store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    groups = {name: dist.new_group(list(range(ranks)), backend=name) for name in names}
    found = {size: measured(size, calls, groups) for size, calls in SIZES.items()}
    if rank == 0:
        print(json.dumps({"ranks": ranks, "sockets": len(sockets), "microseconds": found}))
    dist.destroy_process_group()


main()
