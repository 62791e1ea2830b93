"""The backend of torch.distributed: torch's calls as calls of the client.

A call copies its tensors into the arena and starts the operation there. ``Work.wait`` copies the results back; where a future was
asked for instead, a thread of the attachment does. Everything that blocks releases the interpreter's lock.

Of CUDA's tensors two streams of ours do the copies: the inputs' once the caller's stream has come to the call, the outputs' once the
operation has ended. ``Work.wait`` waits for the operation, and has the caller's stream wait for the outputs' copies.

Of a ``Work`` in Python torch's handle knows ``wait`` and ``get_future`` alone. Whether it has ended, and whom a message came from, the
handle is taught when the first group is made; ``Work.result`` stays empty. Tags are not looked at, as with NCCL: messages of two ranks come
in their order. Torch's profiler sees each call under gloo's names, such as ``harmonaize:all_reduce``.
"""

import hashlib
import os
import re
import secrets
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _RecordFunctionFast

from .. import _core
from .._errors import AgentError, ArgumentError, Error

_C10dBackend = torch._C._distributed_c10d.Backend
_ReduceOp = dist.ReduceOp

# Codes of the agent's interface, which are stable.
_ALL_REDUCE, _ALL_TO_ALL, _BROADCAST, _BARRIER, _ALL_GATHER = 0, 1, 2, 3, 4
_REDUCE_SCATTER, _REDUCE, _GATHER, _SCATTER = 5, 6, 7, 8
_SEND, _RECV = 64, 65
_ANY = 0xFFFF_FFFF

_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.bfloat16: 7,
    torch.float32: 8,
    torch.float64: 9,
    torch.int16: 10,
    torch.uint16: 11,
    torch.bool: 12,
    torch.complex64: 13,
    torch.complex128: 14,
    torch.float8_e4m3fn: 15,
    torch.float8_e5m2: 16,
}

_SUM, _MIN, _MAX, _AVERAGE, _PREMUL_SUM = 0, 2, 3, 4, 8
_REDUCTIONS = {
    _ReduceOp.SUM: _SUM,
    _ReduceOp.PRODUCT: 1,
    _ReduceOp.MIN: _MIN,
    _ReduceOp.MAX: _MAX,
    _ReduceOp.AVG: _AVERAGE,
    _ReduceOp.BAND: 5,
    _ReduceOp.BOR: 6,
    _ReduceOp.BXOR: 7,
}

# Operations in flight at once; an agent has 256 entries for an attachment where its operator says nothing.
_ENTRIES = (256, 64)

_attached = {}
_attaching = threading.Lock()
# Torch holds a backend only from C++, and its Python part would be collected.
_live = set()


def client() -> _core.Client:
    """This process's attachment, which all its groups share: made at the first call."""
    with _attaching:
        found = _attached.get(os.getpid())
        if found is None:
            found = _attached[os.getpid()] = _attach()
        return found


def _attach():
    for entries in _ENTRIES:
        try:
            return _core.Client(entries=entries)
        except AgentError as error:
            if entries == _ENTRIES[-1] or error.status != "Entries":
                raise
    raise AssertionError("unreachable")


def register() -> None:
    """Tells torch of the backend. Torch calls it by itself, through the wheel's entry point."""
    # Where there is no GPU, none: a barrier of a backend for GPUs looks for one. Counting them does not start CUDA.
    devices = ["cpu", "cuda"] if torch.cuda.device_count() else ["cpu"]
    dist.Backend.register_backend("harmonaize", _create, extended_api=True, devices=devices)


def _create(options, backend_options):
    _teach_handles()
    return HarmonaizeBackend(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        list(options.global_ranks_in_group),
    )


def _name(text: str) -> str:
    """What of a name may be in a communicator's."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:40].strip("-")


def join(store, rank, members, group, timeout, **options) -> _core.Communicator:
    """Joins the communicator whose name the first rank leaves in the store: so jobs do not meet, whatever they are called.

    ``members`` has the ranks of the job that form the group. The key is theirs alone: torch gives groups that do not share a
    rank one name, and so one store, where each counts its own.
    """
    key = "harmonaize-" + hashlib.sha256(",".join(map(str, members)).encode()).hexdigest()[:16]
    if rank == 0:
        job = _name(os.environ.get("HARMONAIZE_JOB") or os.environ.get("TORCHELASTIC_RUN_ID") or "torch")
        name = f"{_name(group) or 'group'}-{secrets.token_hex(6)}"
        store.set(key, f"{job or 'torch'}/{name}/{_core.__version__}")
    job, name, version = store.get(key).decode().split("/")
    if version != _core.__version__:
        raise ArgumentError(
            f"rank 0 has harmonaize {version}, and rank {rank} has {_core.__version__}: install one version for the whole job"
        )
    options.update(job=job, timeout=timeout)
    try:
        joined = client().join(name, rank, len(members), operation_timeout=timeout, **options)
    except ArgumentError as error:
        longest = getattr(error, "longest", None)
        if longest is None:
            raise
        # The operator allows less than torch's 30 minutes.
        joined = client().join(name, rank, len(members), operation_timeout=longest, **options)
    if rank == 0:
        # All have read it. A group that is made of this store later has a name of its own.
        store.delete_key(key)
    return joined


def _seconds(timeout: timedelta):
    """Torch's time-out in seconds; none where it says nothing."""
    seconds = timeout.total_seconds()
    return seconds if seconds > 0 else None


class _Asked(threading.local):
    """What a thread asks a handle of torch's for: the work of ours behind it."""

    open, work = False, None


_asked = _Asked()


def _ours(handle):
    """The work of ours behind a handle of torch's, if it is one: the handle asks it for its future."""
    _asked.open = True
    try:
        handle.get_future()
    except RuntimeError:
        pass
    finally:
        work, _asked.open, _asked.work = _asked.work, False, None
    return work


def _teach_handles():
    """Has torch's handles answer for works in Python too what they ask works in C++."""
    handle = dist.Work
    completed, source = handle.is_completed, handle._source_rank
    if getattr(completed, "knows_ours", False):
        return

    def is_completed(self):
        if completed(self):
            return True
        work = _ours(self)
        return work is not None and work.get_future().done()

    def source_rank(self):
        work = _ours(self)
        return source(self) if work is None else work.source()

    is_completed.knows_ours = True
    handle.is_completed, handle._source_rank, handle.source_rank = is_completed, source_rank, source_rank


def _profiled(title, inputs):
    """Shows torch's profiler the calls of a method until they end. ``inputs`` picks the tensors among its arguments."""

    def around(method):
        def call(self, *arguments):
            if not _profiler_enabled():
                return method(self, *arguments)
            # It ends where the list is cleared: on another thread, by which the profiler sees that the call is asynchronous. Its own
            # end would do nothing there.
            record = [_RecordFunctionFast(f"harmonaize:{title}", list(inputs(*arguments)), {})]
            record[0].__enter__()
            work = method(self, *arguments)
            work.show(record)
            return work

        return call

    return around


def _first(tensors, *_):
    return tensors


def _second(_, tensors, *__):
    return tensors if isinstance(tensors, (list, tuple)) else [tensors]


# Of each device, the streams that copy inputs and outputs.
_streams = {}


def _streams_of(device):
    found = _streams.get(device)
    if found is None:
        found = _streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
    return found


def _device_of(kept):
    """The device of the tensors in nested lists of such; none of the host's memory."""
    if not torch.cuda.is_initialized():
        return None
    devices = {tensor.device for tensor in _flat(kept)}
    if len(devices) > 1:
        raise ValueError(f"tensors of one operation are on one device; here are {', '.join(sorted(map(str, devices)))}")
    (device,) = devices or (None,)
    return None if device is None or device.type == "cpu" else device


def _flat(kept):
    if isinstance(kept, torch.Tensor):
        yield kept
    elif kept is not None:
        for part in kept:
            yield from _flat(part)


def queue_on(device, tensors):
    """Has the device's copies come after what its current stream has been given, and keeps the tensors' memory for them: both streams."""
    streams, current = _streams_of(device), torch.cuda.current_stream(device)
    for stream in streams:
        stream.wait_stream(current)
        for tensor in _flat(tensors):
            tensor.record_stream(stream)
    return tuple(stream.cuda_stream for stream in streams)


class _Work(dist.Work):
    """Operations in flight, as one."""

    def __init__(self, backend, staged, outputs, finish=None):
        super().__init__()
        self._backend, self._staged, self._outputs, self._finish = backend, staged, outputs, finish
        self._device = _device_of(outputs)
        self._future = self._record = None

    def show(self, record):
        """Ends what the profiler has of it with the operations."""
        self._record = record
        self.get_future()

    def source(self):
        """The rank that a message came from."""
        (staged,) = self._staged
        peer = staged.wait(None).peer
        if peer is None:
            raise RuntimeError("harmonaize: only a message has a source, and this is none")
        return peer

    def wait(self, timeout=timedelta(0)):
        seconds = _seconds(timeout)
        try:
            for staged in self._staged:
                staged.wait(seconds)
        except Error as error:
            raise self._backend._failed(error) from error
        if self._device is not None:
            torch.cuda.current_stream(self._device).wait_stream(_streams_of(self._device)[1])
        if self._future is not None:
            # It sees to what is left.
            self._future.wait()
        elif self._finish is not None:
            self._finish, finish = None, self._finish
            finish()
        return True

    def get_future(self):
        if _asked.open:
            _asked.work = self
        if self._future is None:
            self._future = self._ended(future_of(self._staged, self._device))
        return self._future

    def _ended(self, base):
        outputs, finish, backend, record = self._outputs, self._finish, self._backend, self._record

        def end(done):
            if record is not None:
                thread = threading.Thread(target=record.clear)
                thread.start()
                thread.join()
            error = done.value()
            if error is not None:
                # An exception set on a future ends DDP's process; one raised here reaches its caller.
                raise backend._failed(error)
            if finish is not None:
                finish()
            return outputs

        return base.then(end)


def future_of(staged, device):
    """A future of the first error, or none, of calls in flight. Whoever waits for it on a device waits for the copies of the outputs."""
    future = torch.futures.Future(devices=[] if device is None else [device])
    left, first, lock = len(staged), None, threading.Lock()
    if not staged:
        future.set_result(None)

    def ended(error):
        nonlocal left, first
        with lock:
            left -= 1
            first = first or error
            last = left == 0
        if last and device is None:
            future.set_result(first)
        elif last:
            with torch.cuda.stream(_streams_of(device)[1]):
                future.set_result(first)

    for one in staged:
        one.then(ended)
    return future


class HarmonaizeBackend(_C10dBackend):
    """A process group's part on the provider."""

    def __init__(self, store, rank, ranks, timeout, group, global_ranks):
        super().__init__(rank, ranks)
        self._rank, self._ranks, self._group = rank, ranks, group
        self._global = global_ranks
        self._settings = _C10dBackend.Options("harmonaize", timeout)
        self._operation_timeout = None
        self._sequence = 0
        self._batch = None
        try:
            self._communicator = join(store, rank, global_ranks or range(ranks), group, timeout.total_seconds())
        except Error as error:
            raise self._failed(error) from error
        _live.add(self)

    def _failed(self, error) -> Exception:
        """An error as torch's callers expect it, with the ranks of the whole job."""
        text = str(error)
        if getattr(error, "status", None) == "Timeout":
            # The words that programs look for in gloo's and NCCL's errors.
            text = f"Timed out waiting: {text}"
        ranks = getattr(error, "ranks", None)
        if ranks and self._global and self._global != list(range(len(self._global))):
            named = ", ".join(str(self._global[rank]) for rank in ranks if rank < len(self._global))
            text += f" (of the group; of the job ranks {named})"
        return dist.DistBackendError(f"harmonaize: {text}")

    # Calls

    def _start(self, code, dtype, reduce, root, inputs, outputs, keep, counts=None, factor=None, timeout=None):
        communicator = self._communicator
        if communicator is None:
            raise dist.DistBackendError("harmonaize: the process group is shut down")
        device = _device_of(keep)
        streams = None if device is None else queue_on(device, keep)
        if code < _SEND:
            self._sequence += 1
        try:
            return communicator._staged(
                code,
                dtype,
                reduce,
                root,
                inputs,
                outputs,
                keep,
                counts,
                factor,
                self._operation_timeout if timeout is None else timeout,
                streams,
            )
        except Error as error:
            raise self._failed(error) from error

    def _root(self, options):
        root = options.rootRank
        if not 0 <= root < self._ranks:
            # The words and the kind that gloo has for it.
            raise dist.DistBackendError(f"harmonaize: invalid root rank: {root}; the group has ranks 0 to {self._ranks - 1}")
        return root

    def _work(self, staged, outputs, finish=None):
        work = _Work(self, staged, outputs, finish)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _reduce_elements(self, code, tensors, options, root=0, to=True):
        reduce, factor = _reduction(options.reduceOp)
        timeout = _seconds(options.timeout)
        if len(tensors) == 1 and _is_plain(tensors[0]):
            # The usual case, quick.
            tensor = tensors[0]
            pieces = [(tensor.data_ptr(), tensor.nbytes)]
            dtype = _DTYPES[tensor.dtype]
            staged = self._start(
                code, dtype, reduce, root, pieces, pieces if to else [], tensor, None, factor, timeout
            )
            return self._work((staged,), tensors)
        if code == _ALL_REDUCE and tensors[0].layout == torch.sparse_coo:
            return self._sparse(tensors, reduce, timeout)
        staged, back = [], _Back()
        # Tensors of one type go as one operation, in the order of their types' first.
        kinds = {}
        for tensor in tensors:
            kinds.setdefault(tensor.dtype, []).append(tensor)
        for dtype, alike in kinds.items():
            hosts = [back.both(tensor) for tensor in alike]
            pieces = _pieces(hosts)
            staged.append(
                self._start(
                    code, _code(dtype), reduce, root, pieces, pieces if to else [], hosts, None, factor, timeout
                )
            )
        return self._work(staged, tensors, back.finish)

    def _sparse(self, tensors, reduce, timeout):
        """Adds a sparse tensor: all ranks' indices and values go to each, and before them how many there are, which blocks."""
        (tensor,) = tensors
        if reduce != _SUM:
            raise ValueError("sparse tensors can be added, and nothing else")
        mine, back = tensor.detach().coalesce(), _Back()
        indices, values = mine.indices().t().contiguous(), mine.values()
        counts, own = torch.empty(self._ranks, dtype=torch.int64, device="cpu"), torch.tensor([len(indices)], device="cpu")
        known = self._gathered([counts], own, back, timeout)
        _Work(self, (known,), []).wait()
        all_indices = [indices.new_empty((count, *indices.shape[1:])) for count in counts.tolist()]
        all_values = [values.new_empty((count, *values.shape[1:])) for count in counts.tolist()]
        staged = [
            self._gathered(all_indices, indices, back, timeout),
            self._gathered(all_values, values, back, timeout),
        ]

        def add():
            with torch.no_grad():
                parts = torch.cat(all_indices).t(), torch.cat(all_values)
                tensor.copy_(torch.sparse_coo_tensor(*parts, tensor.shape).coalesce())

        return self._work(staged, tensors, add)

    @_profiled("all_reduce", _first)
    def allreduce(self, tensors, options):
        return self._reduce_elements(_ALL_REDUCE, tensors, options)

    def allreduce_sparse(self, tensors, options):
        return self.allreduce(tensors, options)

    @_profiled("all_reduce", _first)
    def allreduce_coalesced(self, tensors, options):
        return self._reduce_elements(_ALL_REDUCE, tensors, options)

    @_profiled("reduce", _first)
    def reduce(self, tensors, options):
        root = self._root(options)
        return self._reduce_elements(_REDUCE, tensors, options, root, root == self._rank)

    @_profiled("broadcast", _first)
    def broadcast(self, tensors, options):
        root, back, staged = self._root(options), _Back(), []
        for tensor in tensors:
            mine = root == self._rank
            host = _input(tensor) if mine else back.output(tensor)
            pieces = _pieces([host])
            staged.append(
                self._start(
                    _BROADCAST,
                    _code(tensor.dtype),
                    _SUM,
                    root,
                    pieces if mine else [],
                    [] if mine else pieces,
                    host,
                    timeout=_seconds(options.timeout),
                )
            )
        return self._work(staged, tensors, back.finish)

    def _gathered(self, outputs, tensor, back, timeout):
        """Starts an AllGather into tensors that follow one another by rank."""
        host, hosts = _input(tensor), [back.output(output) for output in outputs]
        _same(tensor, outputs)
        sizes = [output.numel() for output in outputs]
        even = len(outputs) == 1 or len(set(sizes)) == 1
        if sum(sizes) != tensor.numel() * self._ranks and (even or sizes[self._rank] != tensor.numel()):
            raise ValueError(
                f"an all_gather of {tensor.numel()} elements among {self._ranks} ranks into {sum(sizes)} elements"
            )
        counts = None if even else (sizes, [], 0)
        return self._start(
            _ALL_GATHER,
            _code(tensor.dtype),
            _SUM,
            0,
            _pieces([host]),
            _pieces(hosts),
            (host, hosts),
            counts,
            timeout=timeout,
        )

    @_profiled("all_gather", _second)
    def allgather(self, outputs, inputs, options):
        return self._gather_all(outputs, outputs, inputs, options)

    @_profiled("all_gather", _second)
    def allgather_coalesced(self, outputs, inputs, options):
        # One list for each rank, with a tensor of each input.
        into = outputs
        if len(outputs) == self._ranks and all(len(ones) == len(inputs) for ones in outputs):
            into = [[ones[at] for ones in outputs] for at in range(len(inputs))]
        return self._gather_all(outputs, into, inputs, options)

    def _gather_all(self, outputs, into, inputs, options):
        """Starts an AllGather of each input into the list of its place. Of one list the future has the tensors, as gloo's has."""
        timeout, back = _seconds(options.timeout), _Back()
        staged = [self._gathered(ones, one, back, timeout) for ones, one in zip(into, inputs)]
        return self._work(staged, outputs[0] if len(outputs) == 1 else outputs, back.finish)

    @_profiled("all_gather_into_tensor", _second)
    def all_gather_single(self, output, tensor, options):
        back = _Back()
        staged = self._gathered([output], tensor, back, _seconds(options.timeout))
        return self._work((staged,), [output], back.finish)

    @_profiled("all_gather_into_tensor", _second)
    def all_gather_single_coalesced(self, outputs, inputs, options):
        timeout, back = _seconds(options.timeout), _Back()
        staged = [self._gathered([into], one, back, timeout) for into, one in zip(outputs, inputs)]
        return self._work(staged, outputs, back.finish)

    def _scattered_sum(self, output, tensors, back, options):
        """Starts a ReduceScatter of tensors that follow one another by rank."""
        reduce, factor = _reduction(options.reduceOp)
        hosts, host = [_input(tensor) for tensor in tensors], back.output(output)
        _same(output, tensors)
        sizes = [tensor.numel() for tensor in tensors]
        even = len(tensors) == 1 or len(set(sizes)) == 1
        if sum(sizes) != output.numel() * self._ranks and (even or sizes[self._rank] != output.numel()):
            raise ValueError(
                f"a reduce_scatter of {sum(sizes)} elements among {self._ranks} ranks into {output.numel()} elements"
            )
        counts = None if even else (sizes, [], 0)
        return self._start(
            _REDUCE_SCATTER,
            _code(output.dtype),
            reduce,
            0,
            _pieces(hosts),
            _pieces([host]),
            (hosts, host),
            counts,
            factor,
            _seconds(options.timeout),
        )

    @_profiled("reduce_scatter", lambda _, inputs, __: inputs[0])
    def reduce_scatter(self, outputs, inputs, options):
        back = _Back()
        staged = [self._scattered_sum(into, ones, back, options) for into, ones in zip(outputs, inputs)]
        return self._work(staged, outputs, back.finish)

    @_profiled("reduce_scatter_tensor", _second)
    def reduce_scatter_single(self, output, tensor, options):
        back = _Back()
        return self._work((self._scattered_sum(output, [tensor], back, options),), [output], back.finish)

    @_profiled("reduce_scatter_tensor", _second)
    def reduce_scatter_single_coalesced(self, outputs, inputs, options):
        back = _Back()
        staged = [self._scattered_sum(into, [one], back, options) for into, one in zip(outputs, inputs)]
        return self._work(staged, outputs, back.finish)

    def _collected(self, outputs, tensor, options):
        back, host = _Back(), _input(tensor)
        hosts = [back.output(output) for output in outputs]
        _same(tensor, outputs)
        staged = self._start(
            _GATHER,
            _code(tensor.dtype),
            _SUM,
            self._root(options),
            _pieces([host]),
            _pieces(hosts),
            (host, hosts),
            timeout=_seconds(options.timeout),
        )
        return self._work((staged,), outputs, back.finish)

    @_profiled("gather", _second)
    def gather(self, outputs, inputs, options):
        root = options.rootRank == self._rank
        return self._collected(outputs[0] if root else [], inputs[0], options)

    @_profiled("gather", _second)
    def gather_single(self, output, tensor, options):
        root = options.rootRank == self._rank
        return self._collected([output] if root else [], tensor, options)

    @_profiled("scatter", _first)
    def scatter(self, outputs, inputs, options):
        root, back = options.rootRank == self._rank, _Back()
        output = outputs[0]
        hosts, host = [_input(tensor) for tensor in (inputs[0] if root else [])], back.output(output)
        _same(output, hosts)
        staged = self._start(
            _SCATTER,
            _code(output.dtype),
            _SUM,
            self._root(options),
            _pieces(hosts),
            _pieces([host]),
            (hosts, host),
            timeout=_seconds(options.timeout),
        )
        return self._work((staged,), outputs, back.finish)

    @_profiled("all_to_all", _second)
    def all_to_all_single(self, output, tensor, output_splits, input_splits, options):
        back = _Back()
        host, into = _input(tensor), back.output(output)
        _same(tensor, [output])
        counts = None
        if output_splits or input_splits:
            counts = self._pairs(
                _split(tensor, input_splits, self._ranks), _split(output, output_splits, self._ranks)
            )
        staged = self._exchange([host], [into], counts, _seconds(options.timeout))
        return self._work((staged,), [output], back.finish)

    @_profiled("all_to_all", _second)
    def alltoall(self, outputs, inputs, options):
        back = _Back()
        hosts, into = [_input(tensor) for tensor in inputs], [back.output(output) for output in outputs]
        _same(inputs[0], [*inputs, *outputs])
        counts = self._pairs([one.numel() for one in inputs], [one.numel() for one in outputs])
        staged = self._exchange(hosts, into, counts, _seconds(options.timeout))
        return self._work((staged,), outputs, back.finish)

    def _exchange(self, hosts, into, counts, timeout):
        return self._start(
            _ALL_TO_ALL,
            _code(hosts[0].dtype),
            _SUM,
            0,
            _pieces(hosts),
            _pieces(into),
            (hosts, into),
            counts,
            timeout=timeout,
        )

    def _pairs(self, sent, received):
        """Counts of an AllToAll: none where all pairs of all ranks have the same. No rank knows that alone, so it blocks until all call."""
        known = torch.tensor([max(sent), -min(sent)], dtype=torch.int64, device="cpu")
        pieces = _pieces([known])
        staged = self._start(_ALL_REDUCE, _DTYPES[torch.int64], _MAX, 0, pieces, pieces, known)
        try:
            staged.wait(None)
        except Error as error:
            raise self._failed(error) from error
        most, least = known.tolist()
        return None if most == -least else (sent, received, most)

    @_profiled("barrier", lambda _: [])
    def barrier(self, options):
        timeout = _seconds(options.timeout)
        return self._work((self._start(_BARRIER, 1, _SUM, 0, [], [], None, timeout=timeout),), [])

    def monitored_barrier(self, options, wait_all_ranks=False):
        """A barrier whose error at the first rank names those that are late, in gloo's words; afterwards the group has ended."""
        timeout = options.timeout
        if timeout == timedelta(0):
            raise dist.DistBackendError(f"harmonaize: Rank {self._rank} timed out in monitoredBarrier: it was given no time")
        try:
            self._start(_BARRIER, 1, _SUM, 0, [], [], None, timeout=_seconds(timeout)).wait(None)
        except Error as error:
            known = self._failed(error)
            late = sorted(error.ranks)
            if self._rank != 0:
                text = f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
            elif late:
                named = late if wait_all_ranks else late[:1]
                ranks = ", ".join(map(str, named))
                text = f"Rank{'s' if len(named) > 1 else ''} {ranks} failed to pass monitoredBarrier within {timeout.total_seconds()} s"
            else:
                raise known from error
            raise dist.DistBackendError(f"harmonaize: {text}: {str(known).removeprefix('harmonaize: ')}") from error

    # Messages

    @_profiled("send", _first)
    def send(self, tensors, to, tag):
        (tensor,) = tensors
        host = _input(tensor)
        staged = self._start(_SEND, _code(tensor.dtype), _SUM, to, _pieces([host]), [], host)
        return self._work((staged,), tensors)

    @_profiled("recv", _first)
    def recv(self, tensors, source, tag):
        return self._recv(tensors, source)

    @_profiled("recvAnySource", _first)
    def recv_anysource(self, tensors, tag):
        return self._recv(tensors, _ANY)

    def _recv(self, tensors, source):
        (tensor,) = tensors
        back = _Back()
        host = back.output(tensor)
        staged = self._start(_RECV, _code(tensor.dtype), _SUM, source, [], _pieces([host]), host)
        return self._work((staged,), tensors, back.finish)

    # Batches: what is called between the two is waited for together.

    @property
    def supports_coalescing(self):
        return True

    def start_coalescing(self):
        self._batch = []

    def end_coalescing(self):
        works, self._batch = self._batch, None
        staged = [one for work in works for one in work._staged]
        finishes = [work._finish for work in works if work._finish is not None]
        outputs = [work._outputs for work in works]
        return _Work(self, staged, outputs, lambda: [finish() for finish in finishes])

    # Groups

    @property
    def supports_splitting(self):
        return True

    def split(self, store, ranks, options):
        if self._rank not in ranks:
            raise ValueError(
                f"rank {self._rank} is in none of the groups; with the backend harmonaize each rank is in one, be it alone"
            )
        known = self._global or list(range(self._ranks))
        timeout = self._settings._timeout if options is None else options._timeout
        name = getattr(options, "group_name", "") or "split"
        mine = [known[rank] for rank in ranks]
        return HarmonaizeBackend(store, ranks.index(self._rank), len(ranks), timeout, name, mine)

    def perform_nocolor_split(self, device):
        """Nothing: a group of some ranks does not ask the others."""

    def eager_connect_single_device(self, device):
        """Nothing: connected from the start."""

    def getBackendName(self):
        return "harmonaize"

    def name(self):
        return "harmonaize"

    @property
    def options(self):
        return self._settings

    def set_timeout(self, timeout):
        self._settings._timeout = timeout
        self._operation_timeout = _seconds(timeout)

    def _set_default_timeout(self, timeout):
        self.set_timeout(timeout)

    def _set_sequence_number_for_group(self):
        self._sequence = 0

    def _get_sequence_number_for_group(self):
        return self._sequence

    def abort(self):
        if self._communicator is not None:
            self._communicator.abort()
        self.shutdown()

    def shutdown(self):
        self._communicator = None
        _live.discard(self)


class _Back:
    """Tensors that are not as the agent needs them, by the copies that take their places."""

    def __init__(self):
        self._pairs = []

    def output(self, tensor):
        _check(tensor)
        if _is_plain(tensor):
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self._pairs.append((tensor, host))
        return host

    def both(self, tensor):
        host = _input(tensor)
        if host is not tensor:
            self._pairs.append((tensor, host))
        return host

    @property
    def finish(self):
        return self._copy if self._pairs else None

    def _copy(self):
        with torch.no_grad():
            for tensor, host in self._pairs:
                tensor.copy_(host)


def _is_plain(tensor):
    """Whether its memory is what the agent takes."""
    return (
        (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.dtype in _DTYPES
        and not tensor.is_conj()
    )


def _check(tensor):
    if not (tensor.is_cpu or tensor.is_cuda):
        raise ValueError(
            f"harmonaize moves tensors of the host's memory and of CUDA's, and this one is on {tensor.device}; move it with .cpu()"
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"harmonaize moves dense tensors, and this one has the layout {tensor.layout}")
    _code(tensor.dtype)


def _input(tensor):
    _check(tensor)
    return tensor if _is_plain(tensor) else tensor.detach().resolve_conj().contiguous()


def _code(dtype):
    code = _DTYPES.get(dtype)
    if code is None:
        raise TypeError(f"harmonaize has no element type {dtype}; it has {', '.join(map(str, _DTYPES))}")
    return code


def _reduction(op):
    if not isinstance(op, _ReduceOp):
        op = _ReduceOp(op)
    code = _REDUCTIONS.get(op.op)
    if code is not None:
        return code, None
    factor = op.factor
    return _PREMUL_SUM, float(factor)


def _same(tensor, others):
    for other in others:
        if other.dtype != tensor.dtype:
            raise TypeError(f"tensors of one operation have one type; here are {tensor.dtype} and {other.dtype}")


def _pieces(tensors):
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]


def _split(tensor, splits, ranks):
    """Elements for each rank, of splits along the first dimension."""
    if not splits:
        rows = tensor.shape[0] if tensor.dim() else tensor.numel()
        if rows % ranks:
            raise ValueError(f"{rows} rows among {ranks} ranks; they must be a multiple of them, or be split by sizes")
        return [tensor.numel() // ranks] * ranks
    row = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 1
    if len(splits) != ranks or sum(splits) * row != tensor.numel():
        raise ValueError(f"splits {list(splits)} of a tensor of shape {tuple(tensor.shape)} among {ranks} ranks")
    return [rows * row for rows in splits]
