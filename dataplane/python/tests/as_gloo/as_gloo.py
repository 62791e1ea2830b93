"""Has groups of the backend gloo be of this one, for PyTorch's own tests, which name gloo: `cargo xtask wheel --tests`.

Torch takes the first entry point of a backend's name. In PYTHONPATH this folder comes before torch's own. To pytest it is a plugin.
"""

import multiprocessing

import torch.distributed as dist
from harmonaize.torch._backend import _create


def register():
    dist.Backend.register_backend("gloo", _create, extended_api=True, devices=["cpu"])


def pytest_configure():
    """Has a test's ranks fork from pytest's process: each that starts from nothing would import torch first."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    # Where a group's backend is not named, torch looks what gloo is before it looks for entry points.
    register()

    def fork(self):
        self._start_processes(multiprocessing.Process)

    multiprocessing.set_start_method("fork")
    MultiProcessTestCase._spawn_processes = fork
