"""Protected state as checkpoints of torch's: written after a loss or by all ranks, read by torch and by a rank, refused."""

import gc
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import harmonaize
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harmonaize.torch import checkpoint
from harmonaize.torch.checkpoint import read_checkpoint, write_checkpoint
from test_core import WITHIN, client, filled, join
from test_protection import COUNT, state
from test_torch import given, group
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

# Rows and columns of moments, which are of the type that NumPy does not have.
SHAPE = (6, 8)


def moments(rank, step):
    return given(rank + step, SHAPE[0] * SHAPE[1], torch.bfloat16).reshape(SHAPE)


def weights(rank, step):
    return torch.from_numpy(state(rank, step))


def protected(job):
    """A protection of weights, moments, and a tensor of no elements, with the tensors."""
    tensors = {
        "layer.weights": filled(state(job.rank, 0)),
        "moments": client().tensor("bfloat16", SHAPE),
        "nothing": client().tensor("int64", 0),
    }
    return job.protect(tensors, domain=job.rank), tensors


def sealed(job, step):
    protection, tensors = protected(job)
    tensors["layer.weights"].numpy()[:] = state(job.rank, step)
    tensors["moments"].torch()[:] = moments(job.rank, step)
    assert protection.seal(step)
    protection.wait(WITHIN)
    return protection, tensors


def loses_a_rank(folder):
    job = join("checkpoint-lost")
    protection, tensors = sealed(job, 7)
    with pytest.raises(harmonaize.OperationError):
        job.barrier().wait(WITHIN)
        if job.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        job.all_reduce(client().tensor("float32", 8)).wait(WITHIN)
    restored = protection.restore(job.regroup(), [1])
    # It has what was sealed, whatever becomes of the tensors.
    tensors["layer.weights"].numpy()[:] = -1
    states = [protection, *restored.states]
    with pytest.raises(harmonaize.ArgumentError, match=r"'moments' has 48 elements.*\(5, -1\)"):
        write_checkpoint(folder, states, shapes={"moments": (5, -1)})
    assert not folder.exists()
    assert [lost.shapes["moments"] for lost in restored.states] == [SHAPE]
    assert write_checkpoint(folder, states) == 7
    with pytest.raises(harmonaize.ProtectionError, match="already exists") as caught:
        write_checkpoint(folder, states)
    assert caught.value.status == "File"
    return True


def same(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape) and torch.equal(found, expected)


def test_torch_reads_the_states_that_a_restore_brought(lone, tmp_path):
    assert lone.run(loses_a_rank, tmp_path / "7") == [True, None]
    loaded = {"step": 0}
    for rank in (0, 1):
        loaded[f"rank-{rank}"] = {
            "layer.weights": torch.zeros(COUNT + rank),
            "moments": torch.zeros(SHAPE, dtype=torch.bfloat16),
        }
    dcp.load(loaded, checkpoint_id=tmp_path / "7", no_dist=True)
    dcp_to_torch_save(tmp_path / "7", tmp_path / "7.pt")
    whole = torch.load(tmp_path / "7.pt", weights_only=True)
    assert sorted(whole) == ["rank-0", "rank-1", "step"]
    for found in (loaded, whole):
        assert found["step"] == 7
        for rank in (0, 1):
            same(found[f"rank-{rank}"]["layer.weights"], weights(rank, 7))
            same(found[f"rank-{rank}"]["moments"], moments(rank, 7))
    same(whole["rank-1"]["nothing"], torch.zeros(0, dtype=torch.int64))


def writes_as_one(store, backend, folder):
    with group(store, backend) as (rank, ranks):
        job = join(f"checkpoint-{backend}")
        protection, tensors = sealed(job, 3)
        # Each has its own, but for the last: its state is lost.
        states = [] if rank == ranks - 1 else [protection]
        arguments = {"shapes": {"moments": (-1, SHAPE[1])}, "process_group": dist.new_group()}
        with ThreadPoolExecutor() as beside:
            writing = beside.submit(write_checkpoint, folder, states, **arguments)
            # The training goes on meanwhile.
            tensors["layer.weights"].numpy()[:] = -1
            dist.all_reduce(torch.ones(8))
        assert writing.result() == 3
        if rank == 0:
            assert write_checkpoint(folder / "alone", states, no_dist=True) == 3
            alone = {"layer.weights": client().tensor("float32", COUNT)}
            assert read_checkpoint(folder / "alone", 0, alone) == 3
            same(alone["layer.weights"].torch(), weights(0, 3))
        # Of another rank, where there is one that has written.
        other = (rank + 1) % (ranks - 1)
        into = {"layer.weights": client().tensor("float32", COUNT + other), "moments": tensors["moments"]}
        assert read_checkpoint(folder, other, into) == 3
        same(into["layer.weights"].torch(), weights(other, 3))
        same(tensors["moments"].torch(), moments(other, 3))
        with pytest.raises(harmonaize.ArgumentError, match=f"no 'rank-{ranks - 1}.moments'; it has rank-0.layer"):
            read_checkpoint(folder, ranks - 1, {"moments": tensors["moments"]})
    return True


@pytest.mark.parametrize("backend", ["harmonaize", "gloo"])
def test_ranks_write_a_checkpoint_together_and_read_each_others(team, tmp_path, backend):
    assert all(team.run(writes_as_one, tmp_path / "store", backend, tmp_path / "3"))


class Interrupted:
    """A state at which somebody presses Ctrl-C."""

    def write_safetensors(self, _):
        raise KeyboardInterrupt


def fails_as_one(store, folder):
    with group(store) as (rank, _):
        job = join("checkpoint-fails")
        protection, _ = protected(job)
        with pytest.raises(harmonaize.ProtectionError) as caught:
            write_checkpoint(folder, [protection] if rank else [])
        assert caught.value.status == ("NothingSealed" if rank else "Peers"), caught.value
        with pytest.raises(harmonaize.ArgumentError, match="no state"):
            write_checkpoint(folder, [])
        (early, _), (late, _) = sealed(job, 1), sealed(job, 2)
        with pytest.raises(harmonaize.ProtectionError, match="here are states of 1, 2") as caught:
            write_checkpoint(folder, [late] if rank else [early])
        assert caught.value.status == "Differ"
        # Its frames hold what was read then.
        del caught
        gc.collect()
        gc.disable()
        with pytest.raises(KeyboardInterrupt if rank else harmonaize.ProtectionError):
            write_checkpoint(folder, [late, Interrupted()] if rank else [late])
        maps = Path("/proc/self/maps").read_text()
        gc.enable()
        assert not rank or "state.safetensors" not in maps, "what was read before the interrupt is let go"
    return True


def test_what_a_rank_lacks_all_ranks_hear(pair, tmp_path):
    assert all(pair.run(fails_as_one, tmp_path / "store", tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def alone(tensors):
    """A protection of this rank's, of which no other has a replica."""
    return join(f"checkpoint-alone-{os.environ['RANK']}", 0, 1).protect(tensors, replicas=0)


def keeps_each_type(folder):
    types = checkpoint._DTYPES.values()
    tensors = {str(dtype): client().tensor(dtype, (4, 2)) for dtype in types}
    expected = {name: given(index, 8).to(getattr(torch, name.removeprefix("torch."))) for index, name in enumerate(tensors)}
    protection = alone(tensors)
    for name, tensor in tensors.items():
        tensor.torch().copy_(expected[name].reshape(4, 2))
    assert protection.seal(2**63)
    folder = folder / os.environ["RANK"]
    assert write_checkpoint(folder, [protection]) == 2**63
    for tensor in tensors.values():
        tensor.torch().zero_()
    assert read_checkpoint(folder, 0, {}) == 2**63
    # Stored with two dimensions, and read into two.
    assert read_checkpoint(folder, 0, tensors) == 2**63
    for name, tensor in tensors.items():
        found = tensor.torch().flatten()
        assert found.dtype == expected[name].dtype and found.tolist() == expected[name].tolist()
    return len(tensors)


def test_each_type_comes_back(pair, tmp_path):
    assert pair.run(keeps_each_type, tmp_path) == [16, 16]


def refuses(folder):
    folder = folder / os.environ["RANK"]
    tensor = filled(state(0, 1))
    protection = alone({"weights": tensor})
    assert protection.seal(1)
    write_checkpoint(folder / "good", [protection])
    torch.save({}, folder / "torch.pt")
    dcp.save({"rank-0": {"weights": tensor.torch()}}, checkpoint_id=folder / "no-step", no_dist=True)
    dcp.save({"step": "x", "rank-0": {"weights": tensor.torch()}}, checkpoint_id=folder / "no-number", no_dist=True)
    for name, content in [("empty", b""), ("text", b"not a pickle"), ("other", b"N.")]:
        (folder / name).mkdir()
        (folder / name / ".metadata").write_bytes(content)
    write_checkpoint(folder / "cut", [protection])
    for part in (folder / "cut").glob("*.distcp"):
        os.truncate(part, 100)
    (folder / "gone").mkdir()
    for name, status, text in [
        ("nowhere", "File", "No such file"),
        ("gone", "File", "No such file"),
        ("cut", "File", "is not read"),
        ("empty", "Damaged", "no metadata"),
        ("text", "Damaged", "no metadata"),
        ("other", "Damaged", "no metadata"),
        ("no-step", "Damaged", "has no step"),
        ("no-number", "Damaged", "step that is no number"),
    ]:
        with pytest.raises(harmonaize.ProtectionError, match=text) as caught:
            read_checkpoint(folder / name, 0, {"weights": tensor})
        assert caught.value.status == status, name
    for rank, name, into, text in [
        (1, "weights", tensor, "has no 'rank-1.weights'; it has rank-0.weights, step"),
        (0, "bias", tensor, "has no 'rank-0.bias'"),
        (0, "weights", tensor.slice(0, 8), "has 1000 elements of torch.float32, and the tensor 8 of"),
        (0, "weights", client().tensor("int32", COUNT), "and the tensor 1000 of torch.int32"),
    ]:
        with pytest.raises(harmonaize.ArgumentError, match=text):
            read_checkpoint(folder / "good", rank, {"weights": tensor, name: into})
    # What is no folder is not written.
    with pytest.raises(harmonaize.ProtectionError, match="is not written") as caught:
        write_checkpoint(folder / "torch.pt", [protection])
    assert caught.value.status == "File"
    return True


def test_what_is_no_checkpoint_of_protected_state_is_refused(pair, tmp_path):
    assert all(pair.run(refuses, tmp_path))
