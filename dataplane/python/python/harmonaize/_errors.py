"""Exceptions. Each text says what happened and what to do."""


class Error(Exception):
    """Anything that the provider or its agent refuses, or that fails.

    ``ranks`` are the ranks concerned: those that are late, lost, or have aborted. ``status`` is the kind of an
    operation's failure, such as ``"Timeout"``, of a ``ProtectionError``, or of an agent's refusal, such as ``"Entries"``.
    """

    ranks: list[int] = []
    status: "str | None" = None


class AgentError(Error, ConnectionError):
    """The agent cannot be reached, refuses this process, or is lost."""


class ForkedError(Error):
    """The handle belongs to the process that this one was forked from."""


class JoinError(Error):
    """A communicator did not form; ``ranks`` never came, or are gone."""


class OperationError(Error):
    """An operation failed, and its communicator has ended."""


class AbortedError(OperationError):
    """A rank has aborted the communicator."""


class ProtectionError(Error):
    """State is not protected, sealed, restored or written; ``status`` says why, such as ``"NothingSealed"``."""


class WaitTimeout(Error, TimeoutError):
    """Waiting took too long; the operation is still in flight."""


class ArgumentError(Error, ValueError):
    """The arguments do not fit the call."""
