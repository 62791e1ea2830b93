"""A training that torchrun starts again: `elastic.py BACKEND FOLDER [STEP]`. Rank 1 is killed in that step of the first try.

It leaves the losses of all steps in the folder's `losses`, and how often it was started in `starts`.
With backend `none` it is one process, without torchrun, that computes what both ranks would.
"""

import os
import pathlib
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 8

backend, folder, *killed = sys.argv[1:]
state = pathlib.Path(folder) / "state"
torch.manual_seed(7)
alone, restarts = backend == "none", int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
if not alone:
    dist.init_process_group(backend)
    model = DistributedDataParallel(model)
ranks = range(2) if alone else [dist.get_rank()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
done, losses = 0, []
if state.exists():
    kept = torch.load(state, weights_only=True)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    done, losses = kept["done"], kept["losses"]
for step in range(done, STEPS):
    if killed and restarts == 0 and 1 in ranks and step == int(killed[0]):
        os.kill(os.getpid(), signal.SIGKILL)
    batches = [torch.randn(16, 32, generator=torch.Generator().manual_seed(100 * step + rank)) for rank in ranks]
    loss = sum((model(batch) - batch.sum(1, keepdim=True)).square().mean() for batch in batches)
    optimizer.zero_grad()
    (loss / len(ranks)).backward()
    optimizer.step()
    mean = loss.detach().clone()
    if not alone:
        dist.all_reduce(mean)
    losses.append(mean.item())
    if 0 in ranks:
        kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": step + 1, "losses": losses}
        torch.save(kept, state.with_suffix(".new"))
        state.with_suffix(".new").rename(state)
if 0 in ranks:
    (state.parent / "losses").write_text(repr(losses))
    (state.parent / "starts").write_text(str(restarts + 1))
if not alone:
    dist.destroy_process_group()
