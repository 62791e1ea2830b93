"""What a 1 KiB all_reduce of two ranks on one host takes from Python: `cargo xtask wheel --program dataplane/python/tests/overhead.py`.

A round of each kind follows a round of the others, so that what else the machine does falls on all alike. The client's own time is that
of `cargo run --release -p harmonaize-perf`, or of the last line here less what Python adds to it.
"""

import os
import statistics
import time

import harmonaize
import torch
import torch.distributed as dist

ROUNDS, CALLS, ELEMENTS = 30, 200, 256

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("harmonaize")
gloo = dist.new_group(backend="gloo")
client = harmonaize.Client()
job = client.join("overhead")
tensor = client.tensor("float32", ELEMENTS)
owned = torch.zeros(ELEMENTS)
kinds = {
    "harmonaize.all_reduce(tensor).wait()": lambda: job.all_reduce(tensor).wait(),
    "dist.all_reduce(tensor), harmonaize": lambda: dist.all_reduce(owned),
    "dist.all_reduce(tensor), gloo": lambda: dist.all_reduce(owned, group=gloo),
}
times = {kind: [] for kind in kinds}
for _ in range(ROUNDS):
    for kind, call in kinds.items():
        dist.barrier()
        for _ in range(CALLS):
            began = time.perf_counter()
            call()
            times[kind].append(time.perf_counter() - began)
if rank == 0:
    for kind, taken in times.items():
        cuts = statistics.quantiles([1e6 * one for one in taken], n=100)
        print(f"{kind:40} p50 {cuts[49]:8.1f} us  p99 {cuts[98]:8.1f} us", flush=True)
dist.barrier()
dist.destroy_process_group()
