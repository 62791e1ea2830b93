"""What a 1 KiB all_reduce of two ranks on one host takes from Python: `cargo xtask wheel --program dataplane/python/tests/overhead.py`.

A round of each kind follows a round of the others, so that what else the machine does falls on all alike. Then comes what Python
adds, without the operation: the binding's part of a wait, and torch's call with a core that does nothing. The last line is the medians
as JSON, for `cargo xtask bench torch --only calls`, which has the same call in Rust and in C. An argument is the number of rounds.
"""

import json
import os
import statistics
import sys
import time
import timeit

import harmonaize
import torch
import torch.distributed as dist
from harmonaize.torch import _backend

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 30
CALLS, ELEMENTS, REPEATS = 200, 256, 10_000

rank = int(os.environ["RANK"])
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


class Nothing:
    """A core whose operations have ended before they begin."""

    def _staged(self, *_):
        return self

    def wait(self, _):
        return None


def least(call):
    return 1e6 * min(timeit.repeat(call, number=REPEATS, repeat=5)) / REPEATS


ended = job.all_reduce(tensor)
ended.wait()
dist.barrier()
if rank == 0:
    for kind, taken in times.items():
        cuts = statistics.quantiles([1e6 * one for one in taken], n=100)
        print(f"{kind:44} p50 {cuts[49]:8.1f} us  p99 {cuts[98]:8.1f} us")
    (backend,) = _backend._live
    core, backend._communicator = backend._communicator, Nothing()
    options, works = dist.AllreduceOptions(), [owned]
    print(f"{'wait() of an operation that has ended':44} {least(ended.wait):8.2f} us")
    print(f"{'HarmonaizeBackend.allreduce without its core':44} {least(lambda: backend.allreduce(works, options).wait()):8.2f} us")
    print(f"{'dist.all_reduce(tensor) without its core':44} {least(lambda: dist.all_reduce(owned)):8.2f} us", flush=True)
    backend._communicator = core
    medians = [1e6 * statistics.median(taken) for taken in times.values()]
    print(json.dumps(dict(zip(("module_us", "torch_us", "gloo_us"), medians))), flush=True)
dist.barrier()
dist.destroy_process_group()
