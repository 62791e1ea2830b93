"""Conversions of float32 by torch on one thread, timed; a line of JSON for each.

Usage: convert.py make FILE ELEMENTS    writes normal elements as a file of NumPy (float32)
       convert.py time FILE PASSES      converts them there and back; the fastest pass of each counts

What is written to is there already, as it is for the codecs that this is compared with. Blocks of int8 have 256 elements and a scale
each, the greatest magnitude over 127: composed of torch's operations, and by its own quantisation a channel with scales found before.
"""

import json
import sys
import time
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402

MAGIC = b"\x93NUMPY\x01\x00"
BLOCK = 256


def make(path, elements):
    torch.manual_seed(1)
    data = bytearray(4 * elements)
    torch.frombuffer(data, dtype=torch.float32).normal_(std=1e-3)
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({elements},), }}\n"
    with open(path, "wb") as file:
        file.write(MAGIC + len(head).to_bytes(2, "little") + head.encode())
        file.write(data)


def read(path):
    with open(path, "rb") as file:
        data = bytearray(file.read())
    length = int.from_bytes(data[8:10], "little")
    return torch.frombuffer(data[10 + length :], dtype=torch.float32).clone()


def ways(tensor):
    """Codec, way, and what is run to encode and to decode."""
    back = torch.empty_like(tensor)
    for codec, name in [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
    ]:
        into = torch.empty(tensor.shape, dtype=getattr(torch, name))
        yield codec, f"copy_ to {name}", lambda into=into: into.copy_(tensor), lambda into=into: back.copy_(into)
    blocks, back_blocks = tensor.view(-1, BLOCK), back.view(-1, BLOCK)
    codes = torch.empty(blocks.shape, dtype=torch.int8)
    scaled = torch.empty_like(blocks)
    scales = torch.empty((blocks.shape[0], 1))

    def compose():
        # The quickest that was found: aminmax and a norm take twice as long and more.
        torch.abs(blocks, out=scaled)
        torch.amax(scaled, 1, keepdim=True, out=scales).div_(127.0)
        torch.div(blocks, scales, out=scaled).round_()
        codes.copy_(scaled)

    yield "int8", "abs, amax, div, round, copy_", compose, lambda: torch.mul(codes, scales, out=back_blocks)
    compose()
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    given = scales.view(-1).double()
    quantised = {}

    def quantise():
        quantised["is"] = torch.quantize_per_channel(blocks, given, zeros, 0, torch.qint8)

    yield "int8", "quantize_per_channel, scales given", quantise, lambda: quantised["is"].dequantize()


def fastest(run, passes):
    least = float("inf")
    for _ in range(passes):
        began = time.perf_counter_ns()
        run()
        least = min(least, time.perf_counter_ns() - began)
    return least


def measure(path, passes):
    torch.set_num_threads(1)
    tensor = read(path)
    for codec, way, encode, decode in ways(tensor):
        # The first pass of each finds its memory.
        encode()
        decode()
        speeds = [4 * tensor.numel() / fastest(run, passes) for run in (encode, decode)]
        print(json.dumps({"codec": codec, "method": way, "encode": speeds[0], "decode": speeds[1]}), flush=True)


if sys.argv[1] == "make":
    make(sys.argv[2], int(sys.argv[3]))
else:
    measure(sys.argv[2], int(sys.argv[3]))
