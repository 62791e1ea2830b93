"""One rank of torch.distributed with Gloo: a collective of f32, checked and timed over sizes; rank 0 prints a line of JSON a size.

AllReduce, Reduce and Broadcast are in place, for torch has no other way. Its time is the greatest of the ranks' medians of single operations.

Usage: gloo.py STORE RANK RANKS COLLECTIVE BUDGET_US BYTES:ITERATIONS... (STORE: a file that does not exist yet, the same for all ranks;
COLLECTIVE as harmonaize-perf names it, BYTES of the larger tensor, ITERATIONS at most: at least three, and fewer than that where they
would take longer than the budget. COLLECTIVE may be recorded: AllReduces of one iteration, each as BYTES:MICROSECOND of its beginning. It
may be in-turn: AllReduces that are waited for, each as BYTES:MICROSECONDS of computing before it)
"""

import json
import sys
import time
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

RUN = {
    "all_reduce": lambda input, output: dist.all_reduce(output),
    "all_gather": lambda input, output: dist.all_gather_into_tensor(output, input),
    "reduce_scatter": lambda input, output: dist.reduce_scatter_tensor(output, input),
    "alltoall": lambda input, output: dist.all_to_all_single(output, input),
    "alltoallv": lambda input, output: dist.all_to_all_single(output, input, *skewed(input)),
    "sendrecv": lambda input, output: around(input, output),
    "broadcast": lambda input, output: dist.broadcast(output, 0),
    "reduce": lambda input, output: dist.reduce(output, 0),
    "gather": lambda input, output: dist.gather(input, blocks_at_root(output), 0),
    "scatter": lambda input, output: dist.scatter(output, blocks_at_root(input), 0),
}


# Rank 0 gets so many times what each other rank gets.
SKEW = 4


def skewed(input):
    """Elements from each and to each."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    block = input.numel() // (SKEW + ranks - 1)
    return [block * (SKEW if rank == 0 else 1)] * ranks, [block * SKEW] + [block] * (ranks - 1)


def blocks_at_root(tensor):
    """A tensor's blocks by rank, which the root alone has."""
    return list(tensor.chunk(dist.get_world_size())) if dist.get_rank() == 0 else None


def around(input, output):
    """To the next rank around, and from the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = dist.irecv(output, (rank - 1) % ranks)
    dist.send(input, (rank + 1) % ranks)
    received.wait()


def values(rank, first, count):
    """Values that tell ranks and places apart, exact in f32."""
    period = torch.arange((rank + 1) * 7, (rank + 1) * 7 + 1021, dtype=torch.float32)
    return period.repeat((first % 1021 + count) // 1021 + 1)[first % 1021 :][:count]


def expected(collective, rank, ranks, block):
    match collective:
        case "all_gather" | "gather":
            return torch.cat([values(other, 0, block) for other in range(ranks)])
        case "alltoall":
            return torch.cat([values(other, rank * block, block) for other in range(ranks)])
        case "broadcast":
            return values(0, 0, block)
        case "scatter":
            return values(0, rank * block, block)
        case "alltoallv" if rank == 0:
            return torch.cat([values(other, 0, SKEW * block) for other in range(ranks)])
        case "alltoallv":
            return torch.cat([values(other, (SKEW + rank - 1) * block, block) for other in range(ranks)])
        case "sendrecv":
            return values((rank - 1) % ranks, 0, block)
        case _:
            first = rank * block if collective == "reduce_scatter" else 0
            return sum(values(other, first, block) for other in range(ranks))


def measure(collective, rank, ranks, budget_us, size, iterations):
    run = RUN[collective]
    whole = collective in ("all_reduce", "broadcast", "sendrecv", "reduce")
    # As nccl-tests: several blocks are multiples of 16 bytes each.
    block = size // 4 if whole else size // 4 // (ranks * (SKEW if collective == "alltoallv" else 1)) // 4 * 4
    blocks = {"reduce_scatter": ranks, "alltoall": ranks, "alltoallv": SKEW + ranks - 1, "scatter": ranks}
    input = values(rank, 0, block * blocks.get(collective, 1))
    received = {"reduce_scatter": 1, "scatter": 1, "alltoallv": ranks * (SKEW if rank == 0 else 1)}
    output = input.clone() if whole else torch.empty(block * received.get(collective, ranks))
    run(input, output)
    unspecified = collective in ("reduce", "gather") and rank != 0
    wrong = torch.tensor([0 if unspecified else int((output != expected(collective, rank, ranks, block)).sum())])
    # Zeros stay zeros, however often they are added.
    output.fill_(0.0)
    dist.barrier()
    began = time.perf_counter_ns()
    run(input, output)
    affordable = budget_us / ((time.perf_counter_ns() - began) / 1e3)
    chosen = torch.tensor([min(iterations, max(int(affordable), 3))])
    dist.broadcast(chosen, 0)
    for _ in range(int(chosen) // 10):
        run(input, output)
    dist.barrier()
    times = []
    for _ in range(int(chosen)):
        at = time.perf_counter_ns()
        run(input, output)
        times.append((time.perf_counter_ns() - at) / 1e3)
    dist.barrier()
    p50 = torch.tensor([sorted(times)[(len(times) + 1) // 2 - 1]], dtype=torch.float64)
    dist.all_reduce(p50, op=dist.ReduceOp.MAX)
    dist.all_reduce(wrong)
    if rank == 0:
        print(json.dumps({"bytes": size, "p50_us": p50.item(), "wrong": wrong.item()}), flush=True)


def recorded(rank, operations, in_turn):
    """Three iterations, after one that is not timed: AllReduces at their times, until the last is done.

    Times count from the iteration's beginning, and in turn from the end of the operation before.
    """
    ranks, iterations = dist.get_world_size(), 3
    tensors = [torch.full((size // 4,), float(rank + 1)) for size, _ in operations]
    times = []
    for _ in range(1 + iterations):
        dist.barrier()
        began = since = time.perf_counter_ns()
        under_way = []
        for tensor, (_, at) in zip(tensors, operations):
            time.sleep(max(at * 1000 + since - time.perf_counter_ns(), 0) / 1e9)
            if in_turn:
                dist.all_reduce(tensor)
                since = time.perf_counter_ns()
            else:
                under_way.append(dist.all_reduce(tensor, async_op=True))
        for work in under_way:
            work.wait()
        times.append((time.perf_counter_ns() - began) / 1e3)
    # Sums of sums: each iteration but the first has as many times the one before's as there are ranks.
    sums = float(ranks * (ranks + 1) // 2 * ranks**iterations)
    wrong = torch.tensor([sum(int((tensor != sums).sum()) for tensor in tensors)])
    p50 = torch.tensor([sorted(times[1:])[iterations // 2]], dtype=torch.float64)
    dist.all_reduce(p50, op=dist.ReduceOp.MAX)
    dist.all_reduce(wrong)
    if rank == 0:
        size = sum(size for size, _ in operations)
        print(json.dumps({"bytes": size, "p50_us": p50.item(), "wrong": wrong.item()}), flush=True)


def main():
    store, rank, ranks, collective, budget_us = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    pairs = [tuple(map(int, pair.split(":"))) for pair in sys.argv[6:]]
    if collective in ("recorded", "in-turn"):
        recorded(rank, pairs, collective == "in-turn")
    else:
        for pair in pairs:
            measure(collective, rank, ranks, budget_us, *pair)
    dist.barrier()
    dist.destroy_process_group()


main()
