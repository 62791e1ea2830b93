"""Has groups of the backend gloo be of this one, for PyTorch's own tests, which name gloo: `cargo xtask wheel --tests`.

Torch takes the first entry point of a backend's name. In PYTHONPATH this folder comes before torch's own.
"""

import torch.distributed as dist
from harmonaize.torch._backend import _create


def register():
    dist.Backend.register_backend("gloo", _create, extended_api=True, devices=["cpu"])
