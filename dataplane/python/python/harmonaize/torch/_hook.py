"""DDP's gradients by the provider's AllReduce, beside whatever backend the rest of the job uses."""

import fnmatch

import torch
import torch.distributed as dist

from .. import _core
from .._errors import Error
from ._backend import _ALL_REDUCE, _AVERAGE, _check, _code, _device_of, future_of, join, queue_on


def ddp_hook(model, *, budget="exact", layers=None, timeout=1800.0):
    """Has DDP average the gradients of ``model`` by the provider, within an error budget.

    ``budget`` is what may be lost: ``"exact"``, ``"match bf16"``, a number (vNMSE) or a dictionary, as of
    :meth:`harmonaize.Client.join`. ``layers`` gives parameters another one, by patterns of their names as
    ``fnmatch`` has them; the first that fits counts::

        ddp_hook(model, budget=0.01, layers={"*norm*": "exact", "*.bias": "exact"})

    Each budget is a communicator of its own. Of a bucket, parameters that follow one another and have one budget go as one
    operation, and the bucket's future ends with the last. All ranks give the same budgets.

    Returns the state, whose ``receipts`` has the receipt of each operation of the latest step by bucket.
    """
    state = _State(model, budget, layers or {}, timeout)
    model.register_comm_hook(state, _hook)
    return state


class _State:
    def __init__(self, model, budget, layers, timeout):
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._layers, self._budget = layers, budget
        group = model.process_group
        store = dist.PrefixStore("harmonaize-ddp", dist.distributed_c10d._get_process_group_store(group))
        self._communicators = {}
        for place, one in enumerate([budget, *layers.values()]):
            if repr(one) not in self._communicators:
                at = dist.PrefixStore(f"{place}/{_count()}", store)
                self._communicators[repr(one)] = join(
                    at, group.rank(), dist.get_process_group_ranks(group), f"ddp-{place}", timeout, budget=one
                )
        self._runs = {}
        self.receipts = {}

    def _budget_of(self, parameter):
        name = self._names.get(id(parameter), "")
        fits = (one for pattern, one in self._layers.items() if fnmatch.fnmatchcase(name, pattern))
        return repr(next(fits, self._budget))

    def runs(self, bucket):
        """Pairs of a communicator and what of the bucket it reduces: first element and number of elements."""
        parameters = bucket.parameters()
        # Buckets are made anew after the first iteration.
        key = (bucket.index(), tuple(map(id, parameters)), bucket.buffer().numel())
        found = self._runs.get(key)
        if found is None:
            found = []
            for parameter, gradient in zip(parameters, bucket.gradients()):
                budget, size = self._budget_of(parameter), gradient.numel()
                if found and found[-1][0] == budget:
                    found[-1][1] += size
                else:
                    found.append([budget, size])
            total = sum(size for _, size in found)
            if total != bucket.buffer().numel():
                raise ValueError(f"a bucket of {bucket.buffer().numel()} elements with gradients of {total}")
            self._runs[key] = found
        return found

    def communicator(self, budget) -> _core.Communicator:
        return self._communicators[budget]


_made = 0


def _count():
    """How many hooks this process has made: the same at all ranks, which make them in one order."""
    global _made
    _made += 1
    return _made


def _hook(state, bucket):
    buffer = bucket.buffer()
    _check(buffer)
    device = _device_of(buffer)
    streams = None if device is None else queue_on(device, buffer)
    address, size, dtype = buffer.data_ptr(), buffer.element_size(), _code(buffer.dtype)
    started, at = [], 0
    try:
        for budget, elements in state.runs(bucket):
            pieces = [(address + at * size, elements * size)]
            at += elements
            started.append(
                state.communicator(budget)._staged(
                    _ALL_REDUCE, dtype, _AVERAGE, 0, pieces, pieces, buffer, streams=streams
                )
            )
    except Error as error:
        raise dist.DistBackendError(f"harmonaize: {error}") from error
    index = bucket.index()

    def end(done):
        error = done.value()
        if error is not None:
            # An exception set on a future ends DDP's process; one raised here reaches its caller.
            raise dist.DistBackendError(f"harmonaize: {error}")
        state.receipts[index] = [one.poll() for one in started]
        return buffer

    return future_of(started, device).then(end)
