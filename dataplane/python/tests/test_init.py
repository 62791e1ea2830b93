"""torchrun starts a job with nothing but the backend's name: torch finds it by the wheel's entry point."""

import os
import subprocess
import sys

from team import SOCKETS

PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("harmonaize")
tensor = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(tensor)
print(f"rank {dist.get_rank()}: {tensor.item():.0f}")
dist.destroy_process_group()
"""


def test_torchrun_needs_nothing_but_the_name(tmp_path):
    program = tmp_path / "hello.py"
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environment = {**os.environ, "HARMONAIZE_SOCKET": SOCKETS[0], "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(torchrun, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.split("\n"))[1:] == ["rank 0: 3", "rank 1: 3"], ran.stdout
