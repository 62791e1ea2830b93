"""CUDA's tensors, where there is a GPU: what holds of the host's, and the order of streams. All ranks share the first GPU."""

import pytest
import test_torch
import torch
import torch.distributed as dist
from harmonaize.torch import ddp_hook
from test_torch import group, store  # noqa: F401, the fixture too
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")

DEVICE = "cuda:0"


def on_device(function, *arguments):
    """Runs a function whose tensors are then the device's."""
    torch.set_default_device(DEVICE)
    try:
        return function(*arguments)
    finally:
        torch.cuda.synchronize()
        torch.set_default_device("cpu")


@pytest.mark.parametrize("name", ["reductions", "moves"])
def test_calls_are_torchs(team, store, name):  # noqa: F811
    assert all(team.run(on_device, getattr(test_torch, name), store))


def busy(milliseconds=500):
    """Keeps the current stream busy for so long, about: a GPU has some 2 GHz."""
    torch.cuda._sleep(milliseconds * 2_000_000)


def in_order(path):
    with group(path) as (rank, ranks):
        tensor, own = torch.zeros(1 << 20, device=DEVICE), torch.cuda.Stream()
        # The first call pins the arena.
        dist.all_reduce(tensor)
        for turn in range(1, 6):
            # Nobody waits here: each step has the one before's result by the order of the stream alone.
            with torch.cuda.stream(own if turn % 2 else torch.cuda.default_stream()):
                busy()
                tensor.fill_(turn * (rank + 1))
                work = dist.all_reduce(tensor, async_op=True)
                assert not torch.cuda.current_stream().query(), "the call has waited for the device"
                work.wait()
                sums = tensor.clone()
                tensor.zero_()
                assert sums.eq(turn * ranks * (ranks + 1) / 2).all().item()
            torch.cuda.synchronize()
    return True


def test_calls_follow_the_stream_and_do_not_wait_for_it(team, store):  # noqa: F811
    assert all(team.run(in_order, store))


def freed(path):
    """Memory of a tensor that is gone is not used again before its operation has copied it."""
    with group(path) as (rank, ranks):
        results = []
        for turn in range(50):
            tensor = torch.full((1 << 18,), float(turn * (rank + 1)), device=DEVICE)
            results.append(dist.all_reduce(tensor, async_op=True).get_future())
            del tensor
            # It would have the same memory.
            torch.full((1 << 18,), -1.0, device=DEVICE)
        for turn, result in enumerate(results):
            (tensor,) = result.wait()
            assert tensor.eq(turn * ranks * (ranks + 1) / 2).all().item(), turn
        host = torch.ones(3)
        dist.all_reduce(host)
        assert host.tolist() == [ranks] * 3
    return True


def test_memory_stays_until_it_is_copied(team, store):  # noqa: F811
    assert all(team.run(freed, store))


def mixed(path):
    with group(path) as (rank, ranks):
        with pytest.raises(ValueError, match="on one device"):
            dist.all_gather([torch.zeros(2) for _ in range(ranks)], torch.zeros(2, device=DEVICE))
        tensor = torch.arange(6.0, device=DEVICE).reshape(2, 3).t()
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.arange(6.0, device=DEVICE).reshape(2, 3).t() * ranks)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(Exception, match="graph"):
            with torch.cuda.graph(graph):
                dist.all_reduce(tensor)
    return True


def test_what_does_not_go_is_refused(pair, store):  # noqa: F811
    assert all(pair.run(mixed, store))


def train(path, backend, hook=False):
    with group(path, backend) as (rank, _):
        torch.manual_seed(1)
        layers = [torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.ReLU(), torch.nn.Linear(256, 8)]
        model = DistributedDataParallel(torch.nn.Sequential(*layers).to(DEVICE), device_ids=[0], bucket_cap_mb=0.02)
        if hook:
            ddp_hook(model)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        torch.manual_seed(100 + rank)
        for _ in range(20):
            inputs = torch.randn(32, 64, device=DEVICE)
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("hook", [False, True], ids=["backend", "hook"])
def test_a_training_has_gloos_losses(pair, tmp_path, hook):
    ours = pair.run(train, tmp_path / "ours", "gloo" if hook else "harmonaize", hook)
    theirs = pair.run(train, tmp_path / "theirs", "gloo")
    assert ours == theirs and ours[0][-1] < ours[0][0]
