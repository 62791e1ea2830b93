"""One worker of a data-parallel training over torch.distributed with Gloo, with a log of its iterations.

Usage: training.py STORE RANK RANKS [options] (STORE: a file that does not exist yet, the same for all ranks)

The model is real; the time that an accelerator would take is slept. Gradients are reduced by the bucket as soon as the
backward pass has made them, the last layers' first, as torch's own DistributedDataParallel does. Each iteration is a line
of JSON on standard output, times in nanoseconds of CLOCK_MONOTONIC: when it began, when the first AllReduce was called,
when the last one was done. The line before the first says that all ranks are connected.
"""

import argparse
import json
import sys
import time
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("rank", type=int)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--buckets", type=int, default=3, help="AllReduces of an iteration")
    parser.add_argument("--width", type=int, default=320, help="of a layer; a bucket has width * (width + 1) f32")
    parser.add_argument("--forward-ms", type=float, default=20.0, help="what an accelerator takes forward")
    parser.add_argument("--backward-ms", type=float, default=6.0, help="and backward, for all buckets together")
    parser.add_argument("--buffer-bytes", type=int, default=0, help="broadcast from rank 0 before each forward pass")
    parser.add_argument("--slow-from", type=int, default=-1, help="the first iteration that takes longer, if any")
    parser.add_argument("--slow-ms", type=float, default=0.0, help="how much longer it and all later ones take")
    return parser.parse_args()


class Worker:
    """The model, its momentum, and the AllReduces under way."""

    def __init__(self, options):
        self.options = options
        torch.manual_seed(1)
        layers = []
        for _ in range(options.buckets):
            layers += [torch.nn.Linear(options.width, options.width), torch.nn.SiLU()]
        self.model = torch.nn.Sequential(*layers)
        self.velocity = [torch.zeros_like(parameter) for parameter in self.model.parameters()]
        self.buffers = torch.zeros(options.buffer_bytes // 4)
        self.under_way = []
        self.called_ns = 0
        for layer in self.model[::2]:
            bucket = list(layer.parameters())
            ready = set()
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter, bucket=bucket, ready=ready: self.made(parameter, bucket, ready)
                )

    def made(self, parameter, bucket, ready):
        """A gradient is there; with the last of its bucket, the bucket is reduced."""
        ready.add(id(parameter))
        if len(ready) < len(bucket):
            return
        ready.clear()
        time.sleep(self.options.backward_ms / self.options.buckets / 1e3)
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in bucket])
        if not self.under_way:
            self.called_ns = time.monotonic_ns()
        self.under_way.append((dist.all_reduce(flat, async_op=True), flat, bucket))

    def iterate(self, number, inputs):
        """One step. Returns when it began, when the first AllReduce was called, and when the last was done."""
        began = time.monotonic_ns()
        if self.buffers.numel():
            # As DistributedDataParallel does with a module's buffers.
            dist.broadcast(self.buffers, 0)
        self.model.zero_grad(set_to_none=True)
        loss = (self.model(inputs) - inputs).square().mean()
        time.sleep(self.options.forward_ms / 1e3)
        if 0 <= self.options.slow_from <= number:
            time.sleep(self.options.slow_ms / 1e3)
        loss.backward()
        for work, _, _ in self.under_way:
            work.wait()
        done = time.monotonic_ns()
        for _, flat, bucket in self.under_way:
            flat /= self.options.ranks
            parts = flat.split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts):
                parameter.grad.copy_(part.view_as(parameter))
        self.under_way.clear()
        self.descend()
        return began, self.called_ns, done


    @torch.no_grad()
    def descend(self):
        """SGD with momentum. By hand: torch.optim imports packages that are not installed."""
        for parameter, velocity in zip(self.model.parameters(), self.velocity):
            velocity.mul_(0.9).add_(parameter.grad)
            parameter.sub_(velocity, alpha=0.01)


def say(**words):
    print(json.dumps(words), flush=True)


def main():
    options = arguments()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{options.store}", rank=options.rank, world_size=options.ranks
    )
    worker = Worker(options)
    generator = torch.Generator().manual_seed(options.rank)
    inputs = torch.randn(32, options.width, generator=generator)
    dist.barrier()
    say(connected_ns=time.monotonic_ns())
    for number in range(options.iterations):
        began, called, done = worker.iterate(number, inputs)
        say(iteration=number, began_ns=began, called_ns=called, done_ns=done)
    # Workers that do not agree have lost a gradient.
    total = sum(parameter.detach().double().sum() for parameter in worker.model.parameters()).reshape(1)
    everyone = [torch.zeros_like(total) for _ in range(options.ranks)]
    dist.all_gather(everyone, total)
    if any(other != total for other in everyone):
        sys.exit("the workers' parameters differ")
    dist.destroy_process_group()


main()
