"""Python access to the library of the doubles: NCCL's calls, and hooks for tests."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_bool, c_char, c_char_p, c_int, c_long, c_size_t, c_uint, c_uint64, c_void_p
from functools import lru_cache

from tests.doubles.build import library

VERSION = 22703
UNDEFINED = -(2**31)
DTYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3}


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", c_char * 128)]


class Config(ctypes.Structure):
    """Structure ncclConfig_t of NCCL 2.27."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
        ("traffic_class", c_int),
        ("comm_name", c_char_p),
        ("collnet_enable", c_int),
        ("cta_policy", c_int),
        ("shrink_share", c_int),
        ("nvls_ctas", c_int),
    ]


def make_config(**members: int) -> Config:
    config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, VERSION)
    for field in Config._fields_[3:]:
        if field[1] is c_int:
            setattr(config, field[0], UNDEFINED)
    for name, value in members.items():
        setattr(config, name, value)
    return config


SIZE, COMM, STREAM, DATA = c_size_t, c_void_p, c_void_p, c_void_p
POINTER = ctypes.POINTER
SIGNATURES: dict[str, Sequence[object]] = {
    "ncclGetVersion": [POINTER(c_int)],
    "ncclGetUniqueId": [POINTER(UniqueId)],
    "ncclCommInitRankConfig": [POINTER(COMM), c_int, UniqueId, c_int, POINTER(Config)],
    "ncclCommSplit": [COMM, c_int, c_int, POINTER(COMM), POINTER(Config)],
    "ncclCommFinalize": [COMM],
    "ncclCommDestroy": [COMM],
    "ncclCommAbort": [COMM],
    "ncclCommGetAsyncError": [COMM, POINTER(c_int)],
    "ncclCommCount": [COMM, POINTER(c_int)],
    "ncclCommUserRank": [COMM, POINTER(c_int)],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclSend": [DATA, SIZE, c_int, c_int, COMM, STREAM],
    "ncclRecv": [DATA, SIZE, c_int, c_int, COMM, STREAM],
    "ncclBroadcast": [DATA, DATA, SIZE, c_int, c_int, COMM, STREAM],
    "ncclReduce": [DATA, DATA, SIZE, c_int, c_int, c_int, COMM, STREAM],
    "ncclAllReduce": [DATA, DATA, SIZE, c_int, c_int, COMM, STREAM],
    "ncclReduceScatter": [DATA, DATA, SIZE, c_int, c_int, COMM, STREAM],
    "ncclAllGather": [DATA, DATA, SIZE, c_int, COMM, STREAM],
    "ncclMemAlloc": [POINTER(DATA), SIZE],
    "ncclMemFree": [DATA],
    "ncclCommRegister": [COMM, DATA, SIZE, POINTER(DATA)],
    "ncclCommDeregister": [COMM, DATA],
}


@lru_cache(maxsize=1)
def nccl() -> ctypes.CDLL:
    """Return the library, with the types of its calls; one for the process."""
    opened = ctypes.CDLL(str(library()))
    for name, arguments in SIGNATURES.items():
        getattr(opened, name).argtypes = arguments
    opened.ncclGetLastError.argtypes = [COMM]
    opened.ncclGetLastError.restype = c_char_p
    opened.ncclGetErrorString.restype = c_char_p
    opened.gpudist_double_log.argtypes = [c_char_p, c_size_t]
    opened.gpudist_double_log.restype = c_size_t
    opened.gpudist_double_violations.argtypes = [c_char_p, c_size_t]
    opened.gpudist_double_violations.restype = c_size_t
    opened.gpudist_double_inject.argtypes = [c_char_p, c_int, c_int]
    opened.gpudist_double_fail_call.argtypes = [c_char_p, c_int]
    opened.gpudist_double_contexts.argtypes = [c_char_p, c_size_t]
    opened.gpudist_double_contexts.restype = c_size_t
    opened.gpudist_double_set.argtypes = [c_char_p, c_long]
    opened.gpudist_double_set.restype = c_bool
    opened.gpudist_double_hang.argtypes = [STREAM]
    opened.gpudist_double_begin_capture.argtypes = [STREAM]
    opened.gpudist_double_begin_capture.restype = c_uint64
    opened.gpudist_double_end_capture.argtypes = [c_uint64]
    opened.gpudist_double_launch_graph.argtypes = [c_uint64, STREAM]
    opened.gpudist_double_destroy_graph.argtypes = [c_uint64]
    opened.gpudist_double_count.argtypes = [c_char_p]
    opened.gpudist_double_count.restype = c_size_t
    opened.gpudist_double_arm.argtypes = [c_int, c_int, c_int]
    opened.gpudist_double_guard.argtypes = [DATA, c_size_t]
    return opened


def log() -> list[list[str]]:
    """Return descriptions of this process's calls since ``clear``.

    Those of an operation: number, communicator, rank, kind, count, dtype, peer or root, stream,
    groups that are open, reduction.
    """
    return [line.split() for line in lines_of(nccl().gpudist_double_log)]


def violations() -> list[str]:
    """Return the misuses refused in this process, or found by it in its peers' calls."""
    return lines_of(nccl().gpudist_double_violations)


def lines_of(read) -> list[str]:
    size = read(None, 0)
    buffer = ctypes.create_string_buffer(size + 1)
    read(buffer, size)
    return buffer.value.decode().splitlines()


def count(call: str) -> int:
    """Return how often a call of the device's table was carried out in this process.

    Also counts NCCL's ``mem_alloc`` and ``mem_free``, and launches that write nothing unless the
    world has failed: ``launch_that_only_looks``, and ``wide_launch_that_only_looks`` for several
    blocks. ``kernel_bytes`` are the bytes that kernels read and write, ``copied_bytes`` those of
    them that copy cells from tensor to tensor; ``nccl_group`` counts groups with operations.
    """
    return nccl().gpudist_double_count(call.encode())


def contexts() -> dict[int, str]:
    """Return the devices on which this process has a context, and the calls that made them."""
    lines = [line.split(" ", 1) for line in lines_of(nccl().gpudist_double_contexts)]
    return {int(device): call for device, call in lines}


def forget_contexts() -> None:
    nccl().gpudist_double_forget_contexts()


def configure(name: str, value: int) -> None:
    """Set what hooks.cpp has in its table of settings, until ``clear``."""
    assert nccl().gpudist_double_set(name.encode(), value), name


def hang(stream: int) -> None:
    """Put a kernel on a stream that ends with ``clear``."""
    nccl().gpudist_double_hang(stream)


def clear() -> None:
    """Clear the log and everything set by hooks."""
    nccl().gpudist_double_clear()


def inject(what: str, rank: int = -1, after: int = 0) -> None:
    """Make an operation or a call fail, the next one by default.

    Args:
        what: ``async_error``, ``stall``, ``delay``, ``connect`` (the end of its group waits for a
            peer that does not connect) or ``crash`` of an operation; ``call_error`` of any call;
            ``stall_init``.
        rank: in the communicator that the operation's own was split from; any, if negative.
        after: number of operations or calls that succeed first.
    """
    nccl().gpudist_double_inject(what.encode(), rank, after)


def fail_device_call(name: str, after: int = 0) -> None:
    """Let an entry of the device's table fail once."""
    nccl().gpudist_double_fail_call(name.encode(), after)


def arm(signal_number: int, delay_s: float = 0.0, report: int = -1) -> None:
    """Set the effect, once, of an injected ``crash`` or of touching guarded pages.

    Args:
        signal_number: signal that the process gets; none if 0.
        delay_s: time before the signal.
        report: descriptor that receives the monotonic time just before, as a double.
    """
    nccl().gpudist_double_arm(signal_number, int(1e6 * delay_s), report)


def guard(pages: int, nbytes: int) -> None:
    """Strike whoever touches these pages first, as armed."""
    assert nccl().gpudist_double_guard(pages, nbytes) == 0
