"""The module `harmonaize`: tensors, collectives, messages, events, agreements, and what goes wrong."""

import fcntl
import functools
import mmap
import os
import signal
import socket
import threading
import time

import harmonaize
import numpy as np
import pytest

WITHIN = 30.0


@functools.cache
def client():
    return harmonaize.Client()


def join(name, *place, **options):
    return client().join(name, *place, **options)


@functools.cache
def world():
    return join("core")


def mine(rank, count, dtype):
    """What a rank gives: small, so that sums fit each type and are exact."""
    return ((np.arange(count) * 7 + rank * 3 + 1) % 5).astype(dtype)


def filled(array):
    return client().copy_of(array)


# Tensors


def shares_memory():
    tensor = client().tensor("float32", (3, 4))
    array = tensor.numpy()
    array[:] = 1.5
    array[1, 2] = 7
    assert tensor.shape == (3, 4) and tensor.nbytes == 48 and tensor.dtype == "float32" and len(tensor) == 3
    view = memoryview(tensor)
    assert view.format == "f" and view.shape == (3, 4) and view[1, 2] == 7
    again = np.from_dlpack(tensor)
    again[0, 0] = -1
    assert array[0, 0] == -1 and again[1, 2] == 7
    flat = tensor.slice(4, 8).numpy()
    assert list(flat) == [1.5, 1.5, 7, 1.5]
    flat[0] = 9
    assert array[1, 0] == 9 and tensor.reshape((2, 6)).numpy()[0, 4] == 9
    del tensor, view, again, flat
    assert array[1, 0] == 9
    return True


def test_arrays_share_a_tensors_memory(pair):
    assert all(pair.run(shares_memory))


def registers():
    rank, count = world().rank, 4096
    memfd = os.memfd_create("gradients", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memfd, 4 * count)
    with pytest.raises(harmonaize.ArgumentError, match="F_SEAL_SHRINK"):
        client().register(memfd)
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    own = np.frombuffer(mmap.mmap(memfd, 4 * count), np.float32)
    own[:] = mine(rank, count, np.float32)
    region = client().register(memfd)
    os.close(memfd)
    assert region.nbytes == 4 * count
    with pytest.raises(harmonaize.ArgumentError):
        region.tensor("float32", count, offset=4)
    with pytest.raises(harmonaize.ArgumentError):
        region.tensor("float32", 1, offset=2)
    half = region.tensor("float32", (2, count // 4), offset=2 * count)
    world().all_reduce(half).wait(WITHIN)
    every = sum(mine(one, count, np.float32) for one in range(world().ranks))
    assert np.array_equal(own[: count // 2], mine(rank, count, np.float32)[: count // 2])
    assert np.array_equal(own[count // 2 :], every[count // 2 :])
    with pytest.raises(harmonaize.ArgumentError):
        region.unregister()
    with pytest.raises(harmonaize.ArgumentError):
        region.tensor("float32", 1)
    for nothing in (-1, 10**6):
        with pytest.raises((harmonaize.ArgumentError, OSError)):
            client().register(nothing)
    return True


def test_a_memfd_of_ones_own_is_reduced_in_place(pair):
    assert all(pair.run(registers))


def every_type():
    for name in "int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 bool complex64 complex128".split():
        array = mine(world().rank, 100, name)
        tensor = filled(array)
        assert tensor.dtype == name and tensor.numpy().dtype == array.dtype
        op = world().all_reduce(tensor, op="sum")
        op.wait(WITHIN)
        inputs = [mine(rank, 100, name) for rank in range(world().ranks)]
        expected = functools.reduce(np.logical_or if name == "bool" else np.add, inputs)
        assert (tensor.numpy() == expected).all(), name
    return True


def test_all_numpy_types_are_summed(team):
    assert all(team.run(every_type))


def torch_sees_it():
    import torch

    tensor = client().tensor(torch.bfloat16, 64)
    seen = tensor.torch()
    seen.fill_(world().rank + 1)
    world().all_reduce(tensor).wait(WITHIN)
    total = world().ranks * (world().ranks + 1) // 2
    assert seen.dtype == torch.bfloat16 and seen.tolist() == [total] * 64
    with pytest.raises(BufferError, match="DLPack"):
        memoryview(tensor)
    with pytest.raises(harmonaize.ArgumentError, match="from_dlpack"):
        tensor.numpy()
    return True


def test_torch_sees_types_that_numpy_lacks(pair):
    assert all(pair.run(torch_sees_it))


# Collectives


def every_collective(count):
    job = world()
    rank, ranks = job.rank, job.ranks
    all_inputs = [mine(one, count * ranks, "float32") for one in range(ranks)]
    own = all_inputs[rank]
    blocks = [array.reshape(ranks, count) for array in all_inputs]
    total = sum(all_inputs)

    tensor, output = filled(own), client().tensor("float32", count * ranks)
    receipt = job.all_reduce(tensor, output).wait(WITHIN)
    assert (output.numpy() == total).all() and (tensor.numpy() == own).all()
    assert receipt.codec == "exact" and receipt.error == 0 and receipt.peer is None
    for op, reduced in [
        ("max", np.maximum.reduce(all_inputs)),
        ("min", np.minimum.reduce(all_inputs)),
        ("product", np.multiply.reduce(all_inputs)),
        ("average", total / ranks),
    ]:
        tensor = filled(own)
        job.all_reduce(tensor, op=op).wait(WITHIN)
        assert np.allclose(tensor.numpy(), reduced, rtol=1e-6), op
    tensor = filled(own)
    job.options(factor=0.5).all_reduce(tensor, op="premulsum").wait(WITHIN)
    assert np.allclose(tensor.numpy(), total / 2)

    part = client().tensor("float32", count)
    job.reduce_scatter(filled(own), part).wait(WITHIN)
    assert (part.numpy() == total.reshape(ranks, count)[rank]).all()
    tensor = filled(own)
    job.reduce_scatter(tensor).wait(WITHIN)
    assert (tensor.numpy().reshape(ranks, count)[rank] == total.reshape(ranks, count)[rank]).all()

    job.all_gather(filled(blocks[rank][0].copy()), output).wait(WITHIN)
    assert (output.numpy() == np.concatenate([block[0] for block in blocks])).all()
    tensor = filled(own)
    job.all_gather(tensor).wait(WITHIN)
    assert (tensor.numpy() == np.concatenate([blocks[one][one] for one in range(ranks)])).all()

    job.all_to_all(filled(own), output).wait(WITHIN)
    assert (output.numpy() == np.concatenate([block[rank] for block in blocks])).all()

    root = ranks - 1
    tensor = filled(own)
    job.broadcast(tensor, root).wait(WITHIN)
    assert (tensor.numpy() == all_inputs[root]).all()
    tensor = filled(own)
    job.reduce(tensor, root=root).wait(WITHIN)
    assert (tensor.numpy() == (total if rank == root else own)).all()
    job.gather(filled(blocks[rank][0].copy()), output if rank == root else None, root=root).wait(WITHIN)
    if rank == root:
        assert (output.numpy() == np.concatenate([block[0] for block in blocks])).all()
    job.scatter(filled(own) if rank == root else None, part, root=root).wait(WITHIN)
    assert (part.numpy() == blocks[root][rank]).all()
    job.barrier().wait(WITHIN)
    return True


@pytest.mark.parametrize("count", [0, 1, 100, 30_000])
def test_collectives_give_what_numpy_computes(team, count):
    assert all(team.run(every_collective, count))


def uneven():
    job = world()
    rank, ranks = job.rank, job.ranks
    counts = [3 * one for one in range(ranks)]
    arrays = [mine(one, counts[one], "int64") for one in range(ranks)]
    output = client().tensor("int64", sum(counts))
    job.all_gather(filled(arrays[rank]), output, counts=counts).wait(WITHIN)
    assert (output.numpy() == np.concatenate(arrays)).all()
    whole = [mine(one, sum(counts), "int64") for one in range(ranks)]
    part = client().tensor("int64", counts[rank])
    job.reduce_scatter(filled(whole[rank]), part, counts=counts).wait(WITHIN)
    start = sum(counts[:rank])
    assert (part.numpy() == sum(whole)[start : start + counts[rank]]).all()
    sent = lambda one, other: 2 * one + other  # noqa: E731
    send = [sent(rank, other) for other in range(ranks)]
    recv = [sent(other, rank) for other in range(ranks)]
    block = lambda one, other: np.full(sent(one, other), 10 * one + other)  # noqa: E731
    tensor = filled(np.concatenate([block(rank, other) for other in range(ranks)]))
    output = client().tensor("int64", sum(recv))
    most = sent(ranks - 1, ranks - 1)
    job.all_to_all(tensor, output, send_counts=send, recv_counts=recv, most=most).wait(WITHIN)
    assert (output.numpy() == np.concatenate([block(other, rank) for other in range(ranks)])).all()
    return True


def test_blocks_may_differ_in_size(team):
    assert all(team.run(uneven))


def messages():
    job = world()
    rank, ranks = job.rank, job.ranks
    sent, received = filled(mine(rank, 50, "int32")), client().tensor("int32", 50)
    with job.group() as calls:
        out = calls.send(sent, (rank + 1) % ranks)
        come = calls.recv(received, (rank - 1) % ranks)
    ended = {0, 1}
    both = [out, come]
    first = harmonaize.wait_any(both, WITHIN)
    assert first in ended
    out.wait(WITHIN)
    receipt = come.wait(WITHIN)
    assert receipt.peer == (rank - 1) % ranks and come.poll().peer == receipt.peer
    assert (received.numpy() == mine((rank - 1) % ranks, 50, "int32")).all()
    if rank == 0:
        seen = {job.recv(received).wait(WITHIN).peer for _ in range(ranks - 1)}
        assert seen == set(range(1, ranks))
    else:
        job.send(sent, 0).wait(WITHIN)
    job.barrier().wait(WITHIN)
    return True


def test_messages_go_from_rank_to_rank(team):
    assert all(team.run(messages))


def splits():
    job = world()
    half = job.split(job.rank % 2)
    assert half.ranks == job.ranks // 2 and half.rank == job.rank // 2 and "/core#" in half.name
    tensor = filled(np.array([job.rank], dtype="int64"))
    half.all_reduce(tensor).wait(WITHIN)
    assert tensor.numpy()[0] == sum(range(job.rank % 2, job.ranks, 2))
    assert job.split(None if job.rank else 0, timeout=WITHIN) is None or job.rank == 0
    return True


def test_a_communicator_splits(team):
    assert all(team.run(splits))


def lossy():
    job = join("lossy", budget="match bf16")
    job.set_budget(0.01)
    arrays = [np.random.default_rng(rank).standard_normal((1 << 18) + 3).astype("float32") for rank in range(job.ranks)]
    total = sum(array.astype("float64") for array in arrays)
    signal = sum((array.astype("float64") ** 2).sum() for array in arrays)
    feedback, codecs = client().feedback(arrays[0].size), set()
    for residual in (None, feedback, feedback):
        tensor = filled(arrays[job.rank])
        receipt = job.all_reduce(tensor, feedback=residual).wait(WITHIN)
        codecs.add(receipt.codec)
        if residual is None:
            lost = ((tensor.numpy() - total) ** 2).sum() / signal
            assert lost <= receipt.error + 1e-9 and receipt.error <= 0.01, (lost, receipt)
    feedback.reset()
    with pytest.raises(harmonaize.ArgumentError, match="there is no budget"):
        join("other", budget="much")
    return codecs


def test_a_budget_is_kept(spread):
    codecs = set().union(*spread.run(lossy))
    assert codecs - {"exact"}, codecs


def test_types_are_those_of_the_compiled_part():
    """The stubs name each method, property and argument, and none that is not there."""
    import ast
    import inspect
    import pathlib

    stubs = ast.parse((pathlib.Path(harmonaize.__file__).parent / "_core.pyi").read_text())
    for stub in (node for node in stubs.body if isinstance(node, ast.ClassDef)):
        compiled = getattr(harmonaize._core, stub.name)
        methods = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
        public = {name for name in vars(compiled) if not name.startswith("_")}
        assert public == {name for name in methods if not name.startswith("_")}, stub.name
        for name in public - {name for name, node in methods.items() if node.decorator_list}:
            arguments = methods[name].args
            named = [one.arg for one in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
            assert named == list(inspect.signature(getattr(compiled, name)).parameters), (stub.name, name)


# The provider


def agrees():
    job = join("promised")
    if job.rank == 0:
        outcome = client().propose(job.name, {"weight": 2, "on_failure": {"regroup": 5}})
        assert outcome["agreed"] and outcome["agreement"]["constraints"]["weight"] == 2
        assert client().agreement(job.name)["constraints"]["on_failure"] == {"regroup": 5.0}
        refused = client().propose(job.name, '{"priority": "low", "min_busbw": 1000000}')
        assert not refused["agreed"] and "low priority" in refused["reasons"][0]["text"]
        with pytest.raises(harmonaize.ArgumentError, match="unknown field `wait`"):
            client().propose(job.name, {"wait": 2})
        client().hint(job.name, {"period": 0.05, "sequence": [{"bytes": 1 << 20, "overlapped": True}]})
        choice = client().iteration(job.name, {"accumulate": (1, 8)})
        assert choice["accumulate"] >= 1 and choice["checkpoint"] is False and "batch" not in choice
        batch = {"samples": (32, 4096), "micro": (8, 64), "initial": 32, "square": 1.0, "trace": 0.0,
                 "rule": "linear", "sample": 1e-3, "exchange": 0.1}
        chosen = client().iteration(job.name, {"accumulate": (1, 8), "batch": batch})
        assert chosen["batch"] == {"micro": 32 // job.ranks, "learning_rate": 1.0}, chosen
        with pytest.raises(harmonaize.Error, match="32 to 31 samples"):
            client().iteration(job.name, {"batch": batch | {"samples": (32, 31)}})
    job.barrier().wait(WITHIN)
    return True


def test_promises_are_dictionaries(pair):
    assert all(pair.run(agrees))


def hears():
    events = client().events()
    assert events.read() == [] and events.cursor is not None and events.missed == 0
    job = join("heard")
    job.barrier().wait(WITHIN)
    if job.rank == 1:
        # A newcomer that waits to be taken in, of which the members hear.
        with pytest.raises(harmonaize.JoinError):
            client().enter(job.name, timeout=10.0)
        return True
    for event in events:
        if event["communicator"] == job.name and event["kind"] == "newcomers":
            return event["waiting"] == 1


def test_events_are_iterated_over(pair):
    assert all(pair.run(hears))


# What goes wrong


def wrong_arguments():
    job = world()
    floats, halves = client().tensor("float32", 8), client().tensor("float16", 8)
    with pytest.raises(ValueError, match="f16.*f32|f32.*f16"):
        job.all_reduce(floats, halves)
    with pytest.raises(harmonaize.ArgumentError, match="no reduction"):
        job.all_reduce(floats, op="band")
    with pytest.raises(ValueError, match="there is no reduction"):
        job.all_reduce(floats, op="median")
    with pytest.raises(TypeError, match="there are int8, uint8"):
        client().tensor("float128", 8)
    with pytest.raises(harmonaize.ArgumentError, match="multiple of the ranks"):
        job.all_gather(client().tensor("float32", 2 * job.ranks + 1))
    with pytest.raises(harmonaize.ArgumentError, match="another attachment"):
        job.all_reduce(harmonaize.Client().tensor("float32", 8))
    with pytest.raises(harmonaize.ArgumentError, match="8 elements do not have the shape"):
        floats.reshape((3, 3))
    with pytest.raises(harmonaize.Error, match="no room"):
        client().tensor("uint8", 1 << 50)
    job.barrier().wait(WITHIN)
    return True


def test_wrong_arguments_are_refused_at_the_call(pair):
    assert all(pair.run(wrong_arguments))


def aliases():
    job, tensor = join("aliases"), client().tensor("float32", 8)
    other = 1 - job.rank
    first = job.recv(tensor.slice(0, 6), other)
    with pytest.raises(harmonaize.ArgumentError, match="in use by an operation in flight; wait for it first"):
        job.recv(tensor.slice(5, 8), other)
    # What the other sends ends the first: not before both have tried the second.
    world().barrier().wait(WITHIN)
    sent = job.send(filled(mine(job.rank, 6, "float32")), other)
    first.wait(WITHIN)
    sent.wait(WITHIN)
    assert (tensor.numpy()[:6] == mine(other, 6, "float32")).all()
    with pytest.raises(harmonaize.OperationError, match="overlap; give each memory of its own") as caught:
        job.all_reduce(tensor.slice(0, 4), tensor.slice(2, 6)).wait(WITHIN)
    return caught.value.status


def test_tensors_that_alias_are_refused(pair):
    assert pair.run(aliases) == ["Overlap", "Overlap"]


def odd_entries():
    with pytest.raises(harmonaize.AgentError) as caught:
        harmonaize.Client(entries=3)
    return caught.value.status


def test_a_refusal_by_the_agent_has_its_kind(pair):
    assert pair.run(odd_entries) == ["Entries", "Entries"]


def without_rights():
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            harmonaize.Client()
        except harmonaize.AgentError as error:
            text = str(error)
            code = 0 if "runs as user 65534" in text and os.environ["HARMONAIZE_SOCKET"] in text else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_user_without_rights_gets_the_remedy(pair):
    assert pair.run(without_rights) == [0, 0]


def test_a_missing_agent_is_told_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.delenv("HARMONAIZE_SOCKET", raising=False)
    with pytest.raises(harmonaize.AgentError, match="HARMONAIZE_SOCKET is not set"):
        harmonaize.Client()
    path = tmp_path / "agent.sock"
    with pytest.raises(ConnectionError, match="start harmonaize-agent on this host") as caught:
        harmonaize.Client(path)
    assert str(path) in str(caught.value)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        with pytest.raises(harmonaize.AgentError, match="Nobody listens"):
            harmonaize.Client(path)


def late():
    job, failure = join("late", operation_timeout=5.0), None
    if job.rank == 0:
        operation = job.all_reduce(client().tensor("float32", 8))
        with pytest.raises(TimeoutError):
            operation.wait(0.1)
        with pytest.raises(harmonaize.OperationError) as caught:
            operation.wait(WITHIN)
        failure = caught.value.status, caught.value.ranks
    # Only then does the other leave.
    world().barrier().wait(WITHIN)
    return failure


def test_a_time_out_names_the_rank_that_is_late(pair):
    assert pair.run(late) == [("Timeout", [1]), None]


def absent():
    if world().rank == 1:
        return None
    with pytest.raises(harmonaize.JoinError, match="ranks concerned: 1") as caught:
        join("absent", 0, 2, timeout=5.0)
    return caught.value.ranks


def test_a_join_names_the_ranks_that_never_came(pair):
    assert pair.run(absent)[0] == [1]


def interrupt_soon():
    # Whoever starts tests in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()


def interrupted():
    job = join("interrupted")
    if job.rank == 0:
        operation = job.all_reduce(client().tensor("float32", 8))
        with pytest.raises(KeyboardInterrupt):
            interrupt_soon()
            operation.wait()
        assert operation.poll() is None
    # Only then does the other call.
    world().barrier().wait(WITHIN)
    if job.rank == 1:
        operation = job.all_reduce(client().tensor("float32", 8))
    # It is in flight still, and ends.
    operation.wait(WITHIN)
    return True


def test_ctrl_c_ends_a_wait_and_not_the_operation(pair):
    assert all(pair.run(interrupted))


def interrupted_join():
    if world().rank == 0:
        with pytest.raises(KeyboardInterrupt):
            interrupt_soon()
            # Longer than the test waits for its ranks.
            harmonaize.Client().join("alone", 0, 2, timeout=600.0)
    return True


def test_ctrl_c_ends_a_join(pair):
    assert all(pair.run(interrupted_join))


def aborted():
    job = join("aborted")
    if job.rank == 1:
        world().barrier().wait(WITHIN)
        job.abort()
        return True
    operation = job.all_reduce(client().tensor("float32", 8))
    world().barrier().wait(WITHIN)
    with pytest.raises(harmonaize.AbortedError, match="by rank 1") as caught:
        operation.wait(WITHIN)
    assert caught.value.ranks == [1]
    return True


def test_an_abort_names_its_rank(pair):
    assert all(pair.run(aborted))


def killed():
    job = join("killed")
    # The one that lives may not have heard the end of the barrier yet.
    with pytest.raises(harmonaize.OperationError) as caught:
        job.barrier().wait(WITHIN)
        if job.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        job.all_reduce(client().tensor("float32", 8)).wait(WITHIN)
    return caught.value.status, caught.value.ranks


def test_a_killed_rank_is_named(lone):
    assert lone.run(killed) == [("RankLost", [1]), None]


def forks():
    job, tensor = world(), client().tensor("float32", 8)
    tensor.numpy()[:] = 1
    child = os.fork()
    if child == 0:
        code = 1
        try:
            job.all_reduce(tensor)
        except harmonaize.ForkedError as error:
            code = 0 if "after the fork" in str(error) else 2
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    job.all_reduce(tensor).wait(WITHIN)
    assert (tensor.numpy() == job.ranks).all()
    return True


def test_a_forked_child_is_refused_and_its_parent_goes_on(pair):
    assert all(pair.run(forks))


def beside_a_thread(job, call):
    """Makes a call that waits for both ranks, beside a thread of rank 0 that it has to let run: the interpreter's lock is free."""
    beside = world()

    def count():
        for _ in range(50):
            time.sleep(0.001)
        beside.barrier().wait(WITHIN)

    if job.rank == 1:
        # It comes once the other's thread has counted.
        beside.barrier().wait(WITHIN)
        return call()
    thread = threading.Thread(target=count)
    thread.start()
    answer = call()
    thread.join()
    return answer


def threads():
    job = join("threads")
    beside_a_thread(job, lambda: job.barrier().wait(WITHIN))
    return True


def test_waiting_leaves_the_interpreter_to_other_threads(pair):
    assert all(pair.run(threads))
