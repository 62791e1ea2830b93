"""Collectives as a service of the provider.

    import harmonaize

    client = harmonaize.Client()                  # the agent's socket: HARMONAIZE_SOCKET
    job = client.join("job")                      # the rank, as torchrun or another launcher sets it
    tensor = client.tensor("float32", 1024)
    tensor.numpy()[:] = job.rank
    receipt = job.all_reduce(tensor).wait()

A tensor lies in memory that the agent reaches. NumPy, torch and whatever takes the buffer protocol or DLPack see it there
without a copy. ``init_process_group("harmonaize")`` makes torch.distributed use the provider: see ``harmonaize.torch``.
"""

from ._core import (
    Client,
    Communicator,
    Events,
    Feedback,
    Group,
    Operation,
    Protection,
    RankState,
    Receipt,
    Region,
    Restored,
    Tensor,
    __version__,
    wait_any,
)
from ._errors import (
    AbortedError,
    AgentError,
    ArgumentError,
    Error,
    ForkedError,
    JoinError,
    OperationError,
    ProtectionError,
    WaitTimeout,
)

__all__ = [
    "AbortedError",
    "AgentError",
    "ArgumentError",
    "Client",
    "Communicator",
    "Error",
    "Events",
    "Feedback",
    "ForkedError",
    "Group",
    "JoinError",
    "Operation",
    "OperationError",
    "Protection",
    "ProtectionError",
    "RankState",
    "Receipt",
    "Region",
    "Restored",
    "Tensor",
    "WaitTimeout",
    "__version__",
    "wait_any",
]
