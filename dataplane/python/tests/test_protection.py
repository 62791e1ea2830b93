"""Protected state: sealed, restored when a rank is killed, taken over by a newcomer, and written."""

import json
import os
import signal
import threading

import harmonaize
import numpy as np
import pytest
from test_core import WITHIN, beside_a_thread, client, filled, join, world

COUNT = 1000


def state(rank, step):
    """What a rank's weights are after a step: of another size at each rank."""
    return (np.arange(COUNT + rank) + 10_000 * rank + 100 * step).astype("float32")


def written(path):
    """Metadata and weights of a file of safetensors."""
    file = path.read_bytes()
    begin = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:begin])
    first, end = header["weights"]["data_offsets"]
    return header["__metadata__"], np.frombuffer(file[begin:][first:end], "float32")


def loses_a_rank(folder):
    job = join("protected")
    weights = filled(state(job.rank, 0))
    with pytest.raises(harmonaize.ProtectionError, match="2 failure domains.*name each rank's domain") as caught:
        job.protect({"weights": weights})
    assert caught.value.status == "TooFewDomains"
    protection = job.protect({"weights": weights}, domain=job.rank)
    with pytest.raises(harmonaize.ProtectionError, match="no step was sealed") as caught:
        protection.write_safetensors(folder / "none")
    assert caught.value.status == "NothingSealed" and protection.committed is None
    for step in (1, 2):
        weights.numpy()[:] = state(job.rank, step)
        assert protection.seal(step)
        protection.wait(WITHIN)
    assert protection.committed == 1
    # A step that nobody seals.
    weights.numpy()[:] = -1
    # The one that lives may not have heard the end of the barrier yet.
    with pytest.raises(harmonaize.OperationError):
        job.barrier().wait(WITHIN)
        if job.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        job.all_reduce(client().tensor("float32", 8)).wait(WITHIN)
    after = job.regroup()
    restored = protection.restore(after, [1])
    assert (after.ranks, restored.step, restored.lost) == (1, 2, [1])
    assert (weights.numpy() == state(0, 2)).all()
    (lost,) = restored.states
    assert (lost.rank, lost.step, lost.tensors) == (1, 2, {"weights": ("float32", COUNT + 1)})
    assert lost.shapes == {"weights": (COUNT + 1,)}
    taken = client().tensor("float32", COUNT + 1)
    lost.read("weights", taken)
    assert (taken.numpy() == state(1, 2)).all()
    with pytest.raises(harmonaize.ArgumentError, match="none was protected"):
        lost.read("bias", taken)
    with pytest.raises(harmonaize.ArgumentError, match="protected were 1001"):
        lost.read("weights", weights)
    with pytest.raises(harmonaize.ArgumentError, match="rank 7 is asked for"):
        protection.restore(after, [7])
    lost.write_safetensors(folder / "rank-1")
    assert protection.write_safetensors(folder / "rank-0") == 2
    with pytest.raises(harmonaize.ProtectionError) as caught:
        lost.write_safetensors(folder / "nowhere" / "rank-1")
    assert caught.value.status == "File"
    for rank in (0, 1):
        metadata, values = written(folder / f"rank-{rank}")
        assert metadata == {"rank": str(rank), "step": "2"} and (values == state(rank, 2)).all()
    return True


def test_a_killed_ranks_state_comes_back(lone, tmp_path):
    assert lone.run(loses_a_rank, tmp_path) == [True, None]


def comes_without_its_state():
    job = join("protected-newcomer")
    weights = filled(state(job.rank, 1))
    protection = job.protect({"weights": weights}, domain=job.rank)
    assert protection.seal(1)
    protection.wait(WITHIN)
    with pytest.raises(harmonaize.ProtectionError, match="do not call alike") as caught:
        protection.seal(1)
    assert caught.value.status == "Differ"
    after = job.regroup()
    # Rank 1 is as one that was started anew.
    restored = after.restore_newcomer([1]) if job.rank == 1 else protection.restore(after)
    assert (restored.step, restored.lost, len(restored.states)) == (1, [1], job.rank)
    for found in restored.states:
        taken = client().tensor("float32", COUNT + 1)
        found.read("weights", taken)
        assert (taken.numpy() == state(1, 1)).all()
    return True


def test_a_newcomer_gets_the_state_of_a_lost_rank(pair):
    assert all(pair.run(comes_without_its_state))


def seals_beside_a_thread():
    job = join("protected-threads")
    protection = job.protect({}, domain=job.rank)
    return beside_a_thread(job, lambda: protection.seal(1))


def test_sealing_leaves_the_interpreter_to_other_threads(pair):
    assert pair.run(seals_beside_a_thread) == [True, True]


def seals_while_it_computes():
    job = join("protected-copies")
    weights = client().tensor("float32", (COUNT, 3))
    weights.numpy()[:] = job.rank + 1
    protection = job.protect({"weights": weights}, domain=job.rank)
    # What was not begun has ended.
    protection.end_seal(0)
    for step in (1, 2):
        assert protection.begin_seal(step)
        # It may be read meanwhile.
        assert (weights.numpy() == job.rank + step).all()
        protection.end_seal(WITHIN)
        weights.numpy()[:] = job.rank + step + 1
        protection.wait(WITHIN)
    assert protection.committed == 1
    restored = protection.restore(job, [1 - job.rank])
    (other,) = restored.states
    assert (restored.step, other.shapes) == (2, {"weights": (COUNT, 3)})
    taken = client().tensor("float32", (COUNT, 3))
    other.read("weights", taken)
    assert (weights.numpy() == job.rank + 2).all() and (taken.numpy() == 3 - job.rank).all()
    return True


def test_a_seal_is_copied_while_the_job_computes(pair):
    assert pair.run(seals_while_it_computes) == [True, True]


def waits_beside_a_seal():
    job, beside = join("protected-waits"), world()
    protection = job.protect({}, domain=job.rank)
    if job.rank == 1:
        # It comes once the other has not waited for its own thread's seal, which needs this one.
        beside.barrier().wait(WITHIN)
        return protection.seal(1)
    sealed = []
    thread = threading.Thread(target=lambda: sealed.append(protection.seal(1)))
    thread.start()
    with pytest.raises(harmonaize.WaitTimeout, match="another call"):
        # Until the thread has begun there is nothing to wait for.
        while thread.is_alive():
            protection.wait(0.01)
    beside.barrier().wait(WITHIN)
    thread.join()
    return sealed == [True] and protection.committed is None


def test_a_wait_ends_in_time_while_another_thread_seals(pair):
    assert pair.run(waits_beside_a_seal) == [True, True]
