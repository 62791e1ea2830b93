"""One rank of a training by DDP with 25 million parameters; rank 0 prints a line of JSON.

Each step is made twice: once alone, and once with gradients exchanged. What that takes longer is communication that no computing
hides. Times are medians of the steps, the greatest of all ranks.

Usage: ddp.py STORE RANK RANKS BACKEND BUDGET STEPS SEED (STORE: a file that does not exist yet, the same for all ranks; BUDGET: `-`, or
what `harmonaize.torch.ddp_hook` takes beside the backend: `match bf16` or a vNMSE)
"""

import json
import statistics
import sys
import time
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

WIDTH, LAYERS, BATCH, WARM_UP = 2048, 6, 4, 2


def main():
    store, rank, ranks, backend, budget, steps, seed = sys.argv[1:]
    rank, ranks, steps, seed = int(rank), int(ranks), int(steps), int(seed)
    torch.set_num_threads(1)
    began = time.perf_counter()
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    formed = time.perf_counter() - began
    torch.manual_seed(seed)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers[:-1]))
    if budget != "-":
        from harmonaize.torch import ddp_hook

        ddp_hook(model, budget=budget if budget.startswith("match") else float(budget))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    target = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)) / WIDTH**0.5

    def backward(data):
        began = time.perf_counter()
        loss = (model(data) - data @ target).square().mean()
        loss.backward()
        return time.perf_counter() - began, loss.detach()

    alone, together, losses = [], [], []
    data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1000 * seed + rank))
    for _ in range(WARM_UP + steps):
        with model.no_sync():
            dist.barrier()
            alone.append(backward(data)[0])
        optimizer.zero_grad()
        dist.barrier()
        took, loss = backward(data)
        together.append(took)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    figures = [statistics.median(together[WARM_UP:]), statistics.median(alone[WARM_UP:]), formed]
    figures = torch.tensor(figures, dtype=torch.float64)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    loss = torch.stack(losses[-3:]).mean()
    dist.all_reduce(loss)
    if rank == 0:
        step, compute, formed = figures.tolist()
        exposed = max(step - compute, 1e-6)
        told = {"step_ms": step * 1e3, "exposed_ms": exposed * 1e3, "formed_s": formed, "loss": loss.item() / ranks}
        print(json.dumps(told), flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
