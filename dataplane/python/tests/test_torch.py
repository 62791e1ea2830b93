"""`init_process_group("harmonaize")`: each call against a reference, trainings against gloo, and what goes wrong."""

import os
import signal
import time
from datetime import timedelta

import harmonaize
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harmonaize.torch import ddp_hook
from harmonaize.torch._backend import HarmonaizeBackend, _check, join
from torch.nn.parallel import DistributedDataParallel

WITHIN = timedelta(seconds=30)


class group:
    """A process group of the whole team for a block."""

    def __init__(self, path, backend="harmonaize", timeout=WITHIN):
        self.path, self.backend, self.timeout = path, backend, timeout

    def __enter__(self):
        torch.set_num_threads(1)
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(str(self.path), ranks)
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=ranks, timeout=self.timeout)
        return rank, ranks

    def __exit__(self, *_):
        dist.destroy_process_group()


def given(rank, count, dtype=torch.float32):
    return ((torch.arange(count) * 7 + rank * 3 + 1) % 5).to(dtype)


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


# Collectives


def reductions(path):
    with group(path) as (rank, ranks):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
            for count in (0, 1, 1000):
                inputs = [given(one, count, dtype) for one in range(ranks)]
                for op, expected in [
                    (dist.ReduceOp.SUM, sum(inputs)),
                    (dist.ReduceOp.MAX, torch.stack(inputs).amax(0)),
                    (dist.ReduceOp.MIN, torch.stack(inputs).amin(0)),
                    (dist.ReduceOp.PRODUCT, torch.stack(inputs).prod(0).to(dtype)),
                ]:
                    tensor = inputs[rank].clone()
                    dist.all_reduce(tensor, op)
                    assert torch.equal(tensor, expected), (dtype, count, op)
                    for root in range(ranks):
                        tensor = inputs[rank].clone()
                        dist.reduce(tensor, root, op)
                        assert torch.equal(tensor, expected if rank == root else inputs[rank])
        tensor = given(rank, 10)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert torch.allclose(tensor, sum(given(one, 10) for one in range(ranks)) / ranks)
        bits = torch.tensor([1 << rank], dtype=torch.int32)
        dist.all_reduce(bits, dist.ReduceOp.BOR)
        assert bits.item() == (1 << ranks) - 1
        scaled = given(rank, 10)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
        assert torch.allclose(scaled, sum(given(one, 10) for one in range(ranks)) / 2)
        flags = torch.tensor([rank == 0, True])
        dist.all_reduce(flags, dist.ReduceOp.MIN)
        assert flags.tolist() == [False, True]
        turned = torch.complex(given(rank, 4), given(rank + 1, 4))
        dist.all_reduce(turned)
        assert torch.equal(turned.real, sum(given(one, 4) for one in range(ranks)))
    return True


def test_reductions_are_torchs(team, store):
    assert all(team.run(reductions, store))


def moves(path):
    with group(path) as (rank, ranks):
        inputs = [given(one, 12) for one in range(ranks)]
        for root in range(ranks):
            tensor = inputs[rank].clone()
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, inputs[root])
            outputs = [torch.empty(12) for _ in range(ranks)] if rank == root else None
            dist.gather(inputs[rank], outputs, root)
            assert rank != root or all(map(torch.equal, outputs, inputs))
            tensor = torch.empty(12)
            dist.scatter(tensor, inputs if rank == root else None, root)
            assert torch.equal(tensor, inputs[rank])
        outputs = [torch.empty(12) for _ in range(ranks)]
        dist.all_gather(outputs, inputs[rank])
        assert all(map(torch.equal, outputs, inputs))
        whole = torch.empty(12 * ranks)
        dist.all_gather_into_tensor(whole, inputs[rank])
        assert torch.equal(whole, torch.cat(inputs))
        sizes = [one + 1 for one in range(ranks)]
        outputs = [torch.empty(size) for size in sizes]
        dist.all_gather(outputs, given(rank, sizes[rank]))
        assert all(torch.equal(output, given(one, sizes[one])) for one, output in enumerate(outputs))

        whole = [given(one, 6 * ranks) for one in range(ranks)]
        expected = sum(whole).reshape(ranks, 6)[rank]
        output = torch.empty(6)
        dist.reduce_scatter_tensor(output, whole[rank])
        assert torch.equal(output, expected)
        dist.reduce_scatter(output, list(whole[rank].reshape(ranks, 6)))
        assert torch.equal(output, expected)
        parts = [given(rank, size) for size in sizes]
        output = torch.empty(sizes[rank])
        dist.reduce_scatter(output, parts)
        assert torch.equal(output, sum(given(one, sizes[rank]) for one in range(ranks)))

        output = torch.empty(6 * ranks)
        dist.all_to_all_single(output, whole[rank])
        assert torch.equal(output, torch.cat([one.reshape(ranks, 6)[rank] for one in whole]))
        sent = lambda one, other: one + 2 * other  # noqa: E731
        block = lambda one, other: torch.full((sent(one, other), 3), float(10 * one + other))  # noqa: E731
        send, recv = [sent(rank, other) for other in range(ranks)], [sent(other, rank) for other in range(ranks)]
        output = torch.empty(sum(recv), 3)
        dist.all_to_all_single(output, torch.cat([block(rank, other) for other in range(ranks)]), recv, send)
        assert torch.equal(output, torch.cat([block(other, rank) for other in range(ranks)]))
        outputs = [torch.empty(size, 3) for size in recv]
        dist.all_to_all(outputs, [block(rank, other) for other in range(ranks)])
        assert all(torch.equal(output, block(other, rank)) for other, output in enumerate(outputs))
        outputs = [torch.empty(6) for _ in range(ranks)]
        dist.all_to_all(outputs, list(whole[rank].reshape(ranks, 6)))
        assert all(torch.equal(output, whole[one].reshape(ranks, 6)[rank]) for one, output in enumerate(outputs))
        dist.barrier()
        dist.monitored_barrier(timeout=WITHIN)
    return True


def test_moves_are_torchs(team, store):
    assert all(team.run(moves, store))


def coalesced(path):
    with group(path) as (rank, ranks):
        total = lambda count, dtype=torch.float32: sum(given(one, count, dtype) for one in range(ranks))  # noqa: E731
        tensors = [given(rank, 5), given(rank, 12).reshape(3, 4).t(), given(rank, 9)]
        dist.all_reduce_coalesced(tensors)
        assert torch.equal(tensors[0], total(5)) and torch.equal(tensors[2], total(9))
        assert torch.equal(tensors[1], total(12).reshape(3, 4).t())
        tensors = [given(rank, 5), given(rank, 9)]
        with dist._coalescing_manager(async_ops=True) as works:
            for tensor in tensors:
                dist.all_reduce(tensor)
        works.wait()
        assert torch.equal(tensors[0], total(5)) and torch.equal(tensors[1], total(9))
        mesh = list(range(ranks))
        summed = functional.all_reduce_coalesced([given(rank, 5), given(rank, 9)], "sum", mesh)
        assert torch.equal(summed[0], total(5)) and torch.equal(summed[1], total(9))
        gathered = functional.all_gather_into_tensor_coalesced([given(rank, 5), given(rank, 9)], mesh)
        assert torch.equal(gathered[1], torch.cat([given(one, 9) for one in range(ranks)]))
        inputs = [given(rank, 2 * ranks), given(rank, 3 * ranks)]
        parts = functional.reduce_scatter_tensor_coalesced(inputs, "sum", [0, 0], mesh)
        assert torch.equal(parts[1], total(3 * ranks).reshape(ranks, 3)[rank])
        assert torch.equal(functional.all_reduce(given(rank, 5), "avg", mesh), total(5) / ranks)
        assert torch.equal(functional.broadcast(given(rank, 5), 0, mesh), given(0, 5))
        exchanged = functional.all_to_all_single(given(rank, ranks), None, None, mesh)
        assert torch.equal(exchanged, torch.stack([given(one, ranks)[rank] for one in range(ranks)]))
    return True


def test_coalesced_and_functional_calls_are_torchs(team, store):
    assert all(team.run(coalesced, store))


def in_flight(path):
    with group(path) as (rank, ranks):
        total = sum(given(one, 100) for one in range(ranks))
        # More than the rings have entries, waited for by nobody until all are called.
        tensors = [given(rank, 100) for _ in range(600)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        assert all(torch.equal(tensor, total) for tensor in tensors)
        tensor = given(rank, 100)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        (result,) = future.then(lambda done: [2 * done.value()[0]]).wait()
        assert torch.equal(result, 2 * total) and torch.equal(tensor, total)
        # Of a handle that is dropped the result comes all the same.
        tensor = given(rank, 100)
        dist.all_reduce(tensor, async_op=True)
        dist.barrier()
        until = time.monotonic() + 10
        while not torch.equal(tensor, total) and time.monotonic() < until:
            time.sleep(0.01)
        assert torch.equal(tensor, total)
        # Memory that is not contiguous.
        matrix = given(rank, 12).reshape(3, 4)
        dist.all_reduce(matrix.t())
        assert torch.equal(matrix, sum(given(one, 12).reshape(3, 4) for one in range(ranks)))
        column = given(rank, 12).reshape(3, 4)
        dist.broadcast(column[:, 1], 0)
        assert torch.equal(column[:, 1], given(0, 12).reshape(3, 4)[:, 1])
        outputs = [torch.zeros(4, 3).t() for _ in range(ranks)]
        work = dist.all_gather(outputs, given(rank, 12).reshape(3, 4).t().reshape(3, 4), async_op=True)
        work.get_future().wait()
        assert all(torch.equal(output, given(one, 12).reshape(3, 4).t().reshape(3, 4)) for one, output in enumerate(outputs))
    return True


def test_many_calls_are_in_flight(team, store):
    assert all(team.run(in_flight, store))


def values(path):
    with group(path) as (rank, ranks):
        # What gloo's futures have of one input: a list with a tensor of each rank.
        outputs = [torch.empty(2) for _ in range(ranks)]
        value = dist.all_gather(outputs, torch.full((2,), float(rank)), async_op=True).get_future().wait()
        assert [one.tolist() for one in value] == [[one, one] for one in range(ranks)]
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        wide = [[torch.empty(1), torch.empty(2)] for _ in range(ranks)]
        inputs = [torch.full((1,), float(rank)), torch.full((2,), 2.0 * rank)]
        work = backend.allgather_coalesced(wide, inputs, torch._C._distributed_c10d.AllgatherOptions())
        value = work.get_future().wait()
        assert [[part.tolist() for part in ones] for ones in value] == [[[one], [2 * one] * 2] for one in range(ranks)]
        for root in (-1, ranks):
            options = dist.BroadcastOptions()
            options.rootRank = root
            with pytest.raises(dist.DistBackendError, match=f"invalid root rank: {root}; the group has ranks 0 to {ranks - 1}"):
                backend.broadcast([torch.ones(1)], options)
    return True


def test_futures_have_gloos_values_and_wrong_roots_are_named(pair, store):
    assert all(pair.run(values, store))


def messages(path):
    with group(path) as (rank, ranks):
        right, left = (rank + 1) % ranks, (rank - 1) % ranks
        received = torch.empty(10)
        if rank % 2:
            dist.recv(received, left)
            dist.send(given(rank, 10), right)
        else:
            dist.send(given(rank, 10), right)
            dist.recv(received, left)
        assert torch.equal(received, given(left, 10))
        batch = [dist.P2POp(dist.isend, given(rank, 4), right), dist.P2POp(dist.irecv, received[:4], left)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert torch.equal(received[:4], given(left, 4))
        if rank == 0:
            senders = set()
            for _ in range(ranks - 1):
                work = dist.irecv(received)
                while not work.is_completed():
                    time.sleep(0.001)
                assert work.source_rank() == received[0].item()
                senders.add(work.source_rank())
            assert senders == set(range(1, ranks))
            with pytest.raises(RuntimeError, match="this is none"):
                dist.all_reduce(torch.ones(1), group=dist.new_group([0]), async_op=True).source_rank()
        else:
            dist.send(torch.full((10,), float(rank)), 0)
            dist.new_group([0])
        dist.barrier()
    return True


def test_messages_are_torchs(team, store):
    assert all(team.run(messages, store))


def objects(path):
    with group(path) as (rank, ranks):
        gathered = [None] * ranks
        dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (rank + 1)})
        assert [one["rank"] for one in gathered] == list(range(ranks))
        sent = ["a", {"b": rank}] if rank == 1 else [None, None]
        dist.broadcast_object_list(sent, 1)
        assert sent == ["a", {"b": 1}]
        collected = [None] * ranks if rank == 0 else None
        dist.gather_object((rank, "x"), collected, 0)
        assert rank or collected == [(one, "x") for one in range(ranks)]
        mine = [None]
        dist.scatter_object_list(mine, [f"for {one}" for one in range(ranks)] if rank == 0 else None, 0)
        assert mine == [f"for {rank}"]
        if rank == 0:
            dist.send_object_list(["hello"], 1)
        elif rank == 1:
            dist.recv_object_list(sent[:1], 0)
        dist.barrier()
    return True


def test_objects_are_torchs(team, store):
    assert all(team.run(objects, store))


def groups(path):
    with group(path) as (rank, ranks):
        assert dist.get_backend() == "harmonaize"
        mine = rank % 2
        members = [list(range(one, ranks, 2)) for one in range(2)]
        made = [dist.new_group(ones) for ones in members]
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=made[mine])
        assert tensor.item() == sum(members[mine])
        split = dist.split_group(split_ranks=members)
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=split)
        assert tensor.item() == sum(members[mine])
        if rank == 0:
            dist.split_group(split_ranks=[[0]])
        else:
            with pytest.raises(ValueError, match="each rank is in one, be it alone"):
                dist.split_group(split_ranks=[[0]])
        alone = dist.new_group([rank], use_local_synchronization=True)
        dist.all_reduce(tensor, group=alone)
        assert tensor.item() == sum(members[mine])
        mesh = dist.init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("a", "b"))
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=mesh.get_group("b"))
        assert tensor.item() == 2 * (rank // 2 * 2) + 1
        dist.barrier()
    return True


def test_groups_are_torchs(team, store):
    assert all(team.run(groups, store))


class AfterBoth:
    """A store that answers once two groups' first ranks have left their names."""

    def __init__(self, store):
        self._store = store
        self.delete_key = store.delete_key

    def set(self, key, value):
        self._store.set(key, value)
        self._store.add("first ranks", 1)

    def get(self, key):
        while self._store.add("first ranks", 0) < 2:
            time.sleep(0.01)
        return self._store.get(key)


def namesakes(path):
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    halves = [range(ranks // 2), range(ranks // 2, ranks)]
    members = next(half for half in halves if rank in half)
    store = AfterBoth(dist.FileStore(str(path), ranks))
    joined = join(store, members.index(rank), members, "3", WITHIN.total_seconds())
    return joined.name


def test_groups_that_share_a_name_and_no_rank_do_not_meet(team, store):
    names = team.run(namesakes, store)
    assert len(set(names)) == 2, names


def again(path):
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(path), ranks)
    for turn in range(3):
        dist.init_process_group("cpu:harmonaize", store=store, rank=rank, world_size=ranks, timeout=WITHIN)
        if rank:
            # The first rank is ahead, and the others come to what it has left.
            time.sleep(0.2)
        tensor = torch.tensor([float(turn)])
        dist.all_reduce(tensor)
        assert tensor.item() == turn * ranks
        dist.destroy_process_group()
    return True


def test_a_store_serves_one_group_after_another(pair, store):
    assert all(pair.run(again, store))


# Trainings


def network(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)
    )


def train(model, rank, steps=8):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs, labels = torch.randn(16, 32, generator=generator), torch.randint(8, (16,), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def wide():
    """With a layer that is large enough to be compressed."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(32, 8192), torch.nn.ReLU(), torch.nn.Linear(8192, 8))


def by_ddp(path, backend, hooked=False, layers=None, budget="exact", made=network):
    with group(path, backend) as (rank, _):
        # Several buckets, of the small one.
        model = DistributedDataParallel(made(), bucket_cap_mb=0.01 if made is network else 25)
        state = ddp_hook(model, budget=budget, layers=layers) if hooked else None
        losses = train(model, rank)
        receipts = [one for ones in state.receipts.values() for one in ones] if hooked else []
        return losses, len(receipts), sorted({receipt.codec for receipt in receipts})


def losses(answers):
    return torch.tensor([answer[0] for answer in answers], dtype=torch.float64)


def test_ddp_has_the_losses_of_gloo(team, tmp_path):
    own = losses(team.run(by_ddp, tmp_path / "own", "harmonaize"))
    gloo = losses(team.run(by_ddp, tmp_path / "gloo", "gloo"))
    # Two summands have one order.
    assert torch.equal(own, gloo) if team.ranks == 2 else torch.allclose(own, gloo, rtol=1e-5)
    assert own[:, -1].mean() < own[:, 0].mean()


def test_the_ddp_hook_beside_gloo_has_its_losses(team, tmp_path):
    layers = {"1.*": "exact", "*.bias": "exact"}
    answers = team.run(by_ddp, tmp_path / "hooked", "gloo", True, layers)
    gloo = losses(team.run(by_ddp, tmp_path / "gloo", "gloo"))
    assert torch.allclose(losses(answers), gloo, rtol=1e-5)
    assert all(count > 1 and codecs == ["exact"] for _, count, codecs in answers)


def test_the_ddp_hook_takes_budgets_by_layer(spread, tmp_path):
    exact = {"*.bias": "exact", "2.*": "exact"}
    answers = spread.run(by_ddp, tmp_path / "hooked", "gloo", True, exact, {"vnmse": 0.01}, wide)
    gloo = losses(spread.run(by_ddp, tmp_path / "gloo", "gloo", False, None, "exact", wide))
    assert torch.allclose(losses(answers), gloo, rtol=0.1)
    # A bucket is cut where budgets change, and parts of it are compressed.
    for _, count, codecs in answers:
        assert count >= 2 and "exact" in codecs and len(codecs) > 1, (count, codecs)


# What goes wrong


# Whoever is late waits in another group until the others have their error.
SHORT = timedelta(seconds=5)


def late(path):
    with group(path) as (rank, _):
        dist.barrier()
        short = dist.new_group(timeout=SHORT)
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match="ranks concerned: 1"):
                dist.all_reduce(torch.ones(4), group=short)
        dist.barrier()
        return True


def test_a_time_out_names_the_rank_that_is_late(pair, store):
    assert all(pair.run(late, store))


def unmet(path):
    with group(path) as (rank, ranks):
        apart = dist.new_group()
        dist.barrier(apart)
        if rank < ranks - 1:
            with pytest.raises(dist.DistBackendError, match=f"ranks concerned: {ranks - 1}"):
                dist.monitored_barrier(timeout=SHORT)
        dist.barrier(apart)
        return True


def test_a_monitored_barrier_names_who_is_not_there(team, store):
    assert all(team.run(unmet, store))


def late_in_a_group(path):
    with group(path) as (rank, _):
        dist.barrier()
        pair = dist.new_group([1, 3], timeout=SHORT)
        others = dist.new_group([0, 2])
        if rank == 1:
            with pytest.raises(dist.DistBackendError, match="of the job ranks 3"):
                dist.all_reduce(torch.ones(4), group=pair)
        if rank in (0, 2):
            dist.all_reduce(torch.ones(4), group=others)
        dist.barrier()
        return True


def test_a_groups_late_rank_is_told_by_its_rank_in_the_job(spread, store):
    assert all(spread.run(late_in_a_group, store))


def killed(path):
    with group(path) as (rank, _):
        # The one that lives may not have heard the end of the barrier yet.
        with pytest.raises(dist.DistBackendError, match="rank.* 1"):
            dist.barrier()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(4))
        return True


def test_a_killed_rank_is_named(lone, store):
    assert lone.run(killed, store) == [True, None]


def lost_in_ddp(path):
    with group(path) as (rank, _):
        with pytest.raises(RuntimeError, match="rank"):
            model = DistributedDataParallel(network())
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, rank, 3)
        return True


def test_ddp_raises_where_a_rank_is_lost(lone, store):
    assert lone.run(lost_in_ddp, store) == [True, None]


def aborts(path):
    with group(path) as (rank, _):
        apart = dist.new_group()
        work = dist.all_reduce(torch.ones(4), async_op=True) if rank == 0 else None
        dist.barrier(apart)
        if rank == 1:
            dist.group.WORLD.abort()
            return True
        with pytest.raises(dist.DistBackendError, match="aborted by rank 1"):
            work.wait()
        return True


def test_an_abort_reaches_the_others(pair, store):
    assert all(pair.run(aborts, store))


def forks(path):
    with group(path) as (rank, ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                dist.all_reduce(torch.ones(4))
            except dist.DistBackendError as error:
                code = 0 if isinstance(error.__cause__, harmonaize.ForkedError) else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [ranks] * 4
        return True


def test_a_fork_after_init_is_refused(pair, store):
    assert all(pair.run(forks, store))


def refusals(path):
    with group(path) as (rank, ranks):
        with pytest.raises(TypeError, match="no element type torch.float8_e4m3fnuz"):
            dist.broadcast(torch.zeros(4).to(torch.float8_e4m3fnuz), 0)
        with pytest.raises(dist.DistBackendError, match="no reduction"):
            dist.all_reduce(torch.ones(4), dist.ReduceOp.BAND)
        with pytest.raises(ValueError, match="move it with"):
            _check(torch.empty(1, device="meta"))
        one = torch.empty(4)
        with pytest.raises(dist.DistBackendError, match="share memory; give each memory of its own"):
            dist.all_gather([one] * ranks, torch.ones(4))
        ring = torch.empty(4 * ranks - 1)
        with pytest.raises(dist.DistBackendError, match="share memory"):
            dist.all_gather([ring[3 * one : 3 * one + 4] for one in range(ranks)], torch.ones(4))
        with pytest.raises((ValueError, RuntimeError)):
            dist.all_gather_into_tensor(torch.empty(3), torch.empty(ranks + 1))
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [ranks] * 4
        return True


def test_wrong_tensors_are_refused_and_the_group_goes_on(pair, store):
    assert all(pair.run(refusals, store))


def without_agent(path):
    import harmonaize.torch._backend as backend

    before, os.environ["HARMONAIZE_SOCKET"] = os.environ["HARMONAIZE_SOCKET"], "/nowhere/agent.sock"
    attached, backend._attached = backend._attached, {}
    try:
        with pytest.raises(dist.DistBackendError, match="start harmonaize-agent on this host"):
            group(path).__enter__()
    finally:
        os.environ["HARMONAIZE_SOCKET"], backend._attached = before, attached
    return not dist.is_initialized()


def test_a_missing_agent_is_told_with_its_remedy(pair, store):
    assert all(pair.run(without_agent, store))


def versions(path):
    import harmonaize.torch._backend as backend

    rank, own = int(os.environ["RANK"]), backend._core.__version__
    if rank == 0:
        return joins_alone(path)
    backend._core.__version__ = "9.9.9"
    try:
        with pytest.raises(dist.DistBackendError, match=f"rank 0 has harmonaize {own}, and rank {rank} has 9.9.9: install"):
            group(path).__enter__()
    finally:
        backend._core.__version__ = own
    return not dist.is_initialized()


def joins_alone(path):
    with pytest.raises(dist.DistBackendError):
        group(path, timeout=timedelta(seconds=2)).__enter__()
    return not dist.is_initialized()


def test_two_versions_in_a_job_are_refused(pair, store):
    assert all(pair.run(versions, store))


def interrupted(path):
    import threading

    with group(path) as (rank, _):
        apart = dist.new_group()
        if rank == 0:
            # Whoever starts tests in the background has them ignore it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # Called before the signal can come, as a call that waits does.
            work = dist.all_reduce(torch.ones(4), async_op=True)
            with pytest.raises(KeyboardInterrupt):
                threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
                work.wait()
            del work
        # Only then does the other call: had the wait gone on, it would miss this barrier.
        dist.barrier(apart)
        if rank == 1:
            dist.all_reduce(torch.ones(4))
        dist.barrier()
        return True


def test_ctrl_c_ends_a_wait(pair, store):
    assert all(pair.run(interrupted, store))


def test_every_method_is_of_torchs_interface():
    own = {name for name in vars(HarmonaizeBackend) if not name.startswith("__")}
    torchs = set(dir(torch._C._distributed_c10d.Backend))
    private = {name for name in own if name.startswith("_") and name not in torchs}
    called_by_torch = {"getBackendName", "perform_nocolor_split", "start_coalescing", "end_coalescing"}
    called_by_torch |= {"reduce_scatter", "_set_default_timeout"}
    assert own - private - called_by_torch <= torchs
    # What a newer torch adds is to be looked at: it is ours then, or joins these.
    base = {"Options", "rank", "size", "bound_device_id", "get_error", "alltoall_base", "gather_into_tensor"}
    hooks = {"register_abort_hook", "unregister_abort_hook", "supports_abort_hooks", "supports_completion_hooks"}
    memory = {"allocate_tensor", "mem_allocator", "memory_stats", "supports_tensor_alloc", "new_window", "supports_window"}
    members = {"merge", "shrink", "supports_shrinking", "suspend", "resume", "reconfigure", "supports_reconfigure"}
    members |= {"get_reconfigure_handle", "setUsePgForSymmMemRendezvous"}
    assert {name for name in torchs - own if not name.startswith("_")} <= base | hooks | memory | members
    assert harmonaize.torch.HarmonaizeBackend is HarmonaizeBackend
