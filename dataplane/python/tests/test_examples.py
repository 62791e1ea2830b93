"""Programs as a person runs them: the examples of the documents, and a training that torchrun starts again."""

import os
import pathlib
import subprocess
import sys

from team import SOCKETS

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def ran(*words):
    environment = {**os.environ, "HARMONAIZE_SOCKET": SOCKETS[0], "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.split("\n")[:-1]


def test_torchrun_needs_nothing_but_the_backends_name():
    # Both write to one pipe, and lines may meet.
    said = "".join(lines(ran(*TORCHRUN, str(EXAMPLES / "hello_torch.py"))))
    expected = [f"rank {rank} of 2: 1, by harmonaize" for rank in range(2)]
    assert all(line in said for line in expected) and len(said) == sum(map(len, expected)), said


def test_hello_runs_without_torch():
    program = "import os, runpy, sys; os.environ.update(RANK=sys.argv[1], WORLD_SIZE='2'); runpy.run_path(sys.argv[2])"
    program += "; assert 'torch' not in sys.modules"
    ranks = [ran(sys.executable, "-c", program, str(rank), str(EXAMPLES / "hello.py")) for rank in range(2)]
    said = [line for rank in ranks for line in lines(rank)]
    assert [line.split(", by")[0] for line in said] == ["rank 0 of 2: 1", "rank 1 of 2: 1"]


def trained(launcher, folder, *arguments):
    folder.mkdir()
    program = [str(pathlib.Path(__file__).with_name("elastic.py")), arguments[0], str(folder), *arguments[1:]]
    lines(ran(*launcher, *program))
    return (folder / "losses").read_text(), (folder / "starts").read_text()


def test_a_training_whose_worker_is_killed_ends_as_that_of_one_process(tmp_path):
    whole, starts = trained([sys.executable], tmp_path / "whole", "none")
    assert starts == "1"
    launcher = [*TORCHRUN, "--max-restarts", "1"]
    assert trained(launcher, tmp_path / "killed", "harmonaize", "5") == (whole, "2")
