"""Inputs for the program as safetensors, and comparison of two of its outputs, with the standard library alone."""

import array
import json
import math
import random
import struct
import sys

KINDS = {"F32": "f", "BF16": "H"}
"""Element types that are written and read, and the type of an array that holds them; bf16 as its bits."""
POOL = 1 << 16
"""Normal numbers that are drawn. Rows of a tensor are runs of them from random places."""


def to_bf16(x):
    """The bits of the bf16 next to `x`, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def from_bf16(bits):
    """The numbers whose bits these are."""
    wide = array.array("I", (x << 16 for x in bits))
    numbers = array.array("f")
    numbers.frombytes(wide.tobytes())
    return numbers


class Random:
    """Tensors of numbers that are normal before `value` is applied."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.pool = [self.random.gauss(0.0, 1.0) for _ in range(POOL)]

    def rows(self, count, width, value, dtype="BF16"):
        convert = to_bf16 if dtype == "BF16" else float
        pool = array.array(KINDS[dtype], (convert(value(x)) for x in self.pool))
        out = array.array(KINDS[dtype])
        for _ in range(count):
            begin = self.random.randrange(POOL - width)
            out.extend(pool[begin : begin + width])
        return dtype, out


def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


def problem(op, tokens, heads, dim, seed=1):
    """Tensors and metadata of a problem in bf16 whose states last, so that what one PE sends another matters.

    Of the kind of `deltalink bench op --gates slow`: decays of about 0.4 % a token, steps of about 0.02.
    """
    draw = Random(seed)
    wide, narrow = [1, tokens, heads, dim], [1, tokens, heads]

    def tensor(shape, value, dtype="BF16"):
        width = shape[-1]
        dtype, data = draw.rows(math.prod(shape[:-1]), width, value, dtype)
        return dtype, shape, data

    mean = [1.5 * x for x in draw.pool[:dim]]
    keys = tensor(wide, lambda x: x, "F32")[2]
    keys = array.array("H", (to_bf16(x + mean[i % dim]) for i, x in enumerate(keys)))
    tensors = {
        "q": tensor(wide, lambda x: x),
        "k": ("BF16", wide, keys),
        "v": tensor(wide, lambda x: x),
        "beta": tensor(narrow, lambda x: sigmoid(x - 4.0)),
        "do": tensor(wide, lambda x: x),
    }
    metadata = {"op": op, "scale": repr(dim**-0.5), "use_qk_l2norm": "true", "gate": "none", "lower_bound": "none",
                "allow_neg_eigval": "false", "layout": "K-first"}
    if op == "kda":
        slow = math.log(0.0008 / (1.0 - 0.0008))
        tensors["g_raw"] = tensor(wide, lambda x: slow + 0.5 * x)
        tensors["A_log"] = ("F32", [heads], array.array("f", [0.0] * heads))
        tensors["dt_bias"] = ("F32", [heads, dim], array.array("f", [0.0] * (heads * dim)))
        metadata.update(gate="lower_bound", lower_bound="-5")
    else:
        tensors["g"] = tensor(narrow, lambda x: -0.004 * math.exp(0.5 * x), "F32")
    return tensors, metadata


def save(path, tensors, metadata):
    header, offset = {"__metadata__": metadata}, 0
    for name, (dtype, shape, data) in tensors.items():
        size = len(data) * data.itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(little(data).tobytes())


def load(path):
    """Numbers of each tensor, by name."""
    with open(path, "rb") as file:
        content = file.read()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + at for at in entry["data_offsets"])
        data = array.array(KINDS[entry["dtype"]])
        data.frombytes(content[begin:end])
        data = little(data)
        tensors[name] = from_bf16(data) if entry["dtype"] == "BF16" else data
    return tensors


def little(data):
    """Files are little-endian."""
    if sys.byteorder == "big":
        data = array.array(data.typecode, data)
        data.byteswap()
    return data


def distances(found, expected):
    """Relative RMS difference of each tensor that both have; nan where lengths differ or a number is not finite."""
    def distance(a, b):
        if len(a) != len(b):
            return math.nan
        norm = math.fsum(y * y for y in b)
        off = math.fsum((x - y) ** 2 for x, y in zip(a, b))
        return math.sqrt(off / norm) if norm > 0.0 else math.sqrt(off)

    return {name: distance(found[name], expected[name]) for name in found if name in expected}
