"""The provider's collectives for PyTorch (2.14 and newer).

    torch.distributed.init_process_group("harmonaize")     # found by itself once the wheel is installed

makes them the backend of torch.distributed, and :func:`ddp_hook` has DDP reduce gradients by them beside any backend.
Both attach to the agent of this host, whose socket ``HARMONAIZE_SOCKET`` names. Tensors are of the host's memory, or a
CUDA device's, which are staged there. ``harmonaize.torch.checkpoint`` has protected state as checkpoints of torch's.
"""

from ._backend import HarmonaizeBackend, client, register
from ._hook import ddp_hook

__all__ = ["HarmonaizeBackend", "client", "ddp_hook", "register"]
