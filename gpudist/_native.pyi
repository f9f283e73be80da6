"""Native core: packing, messages through shared memory, and NCCL."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypedDict

import torch

from gpudist.errors import TransportError
from gpudist.transport.flight_recorder import Activity, FlightRecorder, Operation

# A box lists all starts, then all stops.
_Boxes = Sequence[Sequence[int]]
_Messages = Sequence[tuple[int, _Boxes]]
# Takes an operation and a function that raises the error again; raises.
Failed = Callable[[Operation | None, Callable[[], object]], NoReturn]

FAILURE_BYTES: int

class WorldFailed(Exception): ...
class RefusedCapture(TransportError): ...

class Dtype(enum.Enum):
    bool = 0
    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float16 = 6
    bfloat16 = 7
    float32 = 8
    float64 = 9
    complex64 = 10
    complex128 = 11

class Signature:
    """Label of an operation, and 16 bytes that identify it."""

    def __init__(self, label: str, digest: bytes) -> None: ...

class BoundStage:
    """Stage of a plan, bound to shapes, strides and a dtype."""

    def __init__(
        self,
        dtype: Dtype,
        input_strides: Sequence[int],
        output_strides: Sequence[int],
        output_items: int,
        fill: float,
        starts_with_copy: bool,
        same_cells: bool,
        accumulates: bool,
        fills: _Boxes,
        move_sources: _Boxes,
        move_destinations: _Boxes,
        sends: _Messages,
        receives: _Messages,
        sums: _Messages,
        own_sources: _Boxes,
        relays: _Messages,
        relayed: _Messages,
    ) -> None: ...

class Buffer(enum.Enum):
    input = 0
    output = 1
    sent = 2
    received = 3

class WireKind(enum.Enum):
    send = 0
    receive = 1
    broadcast = 2
    reduce = 3
    all_reduce = 4
    all_gather = 5
    reduce_scatter = 6

class NcclCommunicator:
    """NCCL communicator, owned by its world."""

# Shape; destination and summands, each a buffer, an offset and strides in items; whether the first
# summand is already in place.
_CombineJob = tuple[Sequence[int], Sequence[tuple[Buffer, int, Sequence[int]]], bool]
# Kind, communicator (None: the world's), peer, source, offset, target, offset, count, dtype, op.
_NcclStep = tuple[WireKind, NcclCommunicator | None, int, Buffer, int, Buffer, int, int, int, int]
# Kind, communicator, peer, addresses of source and target, count, dtype, op.
_NcclCall = tuple[WireKind, NcclCommunicator | None, int, int, int, int, int, int]

class DeviceStage:
    """Stage of a plan on a GPU."""

    def __init__(
        self,
        world: NcclWorld,
        dtype: Dtype,
        fill: float,
        before: Sequence[_CombineJob],
        after: Sequence[_CombineJob],
        steps: Sequence[_NcclStep],
        sent_bytes: int,
        received_bytes: int,
        captured: DeviceStage | None = None,
    ) -> None: ...

class NcclWorld:
    """One rank of a world over NCCL."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: int,
        timeout_s: float,
        nccl_library: str,
        wheel_libraries: Sequence[str],
        device_library: str,
        make_room: Callable[[], object] | None = None,
    ) -> None: ...
    def new_id(self) -> bytes: ...
    def connect(self, id: bytes, members: Sequence[int]) -> NcclCommunicator: ...
    def split(
        self, parent: NcclCommunicator, color: int, key: int, members: Sequence[int]
    ) -> NcclCommunicator | None: ...
    def run_calls(self, signature: Signature, calls: Sequence[_NcclCall], stream: int) -> None: ...
    def start(
        self, signature: Signature, calls: Sequence[tuple[DeviceStage, int, int]], stream: int
    ) -> int: ...
    def join(self, event: int, stream: int) -> None: ...
    def settle(self, stream: int) -> None: ...
    def synchronize(self, stream: int) -> None: ...
    def watch_process(self, rank: int, pid: int) -> None: ...
    def begin(self, label: str) -> int: ...
    def enqueue(self, label: str, stream: int, put: Callable[[], object]) -> None: ...
    def drop(self, operation: int) -> None: ...
    def next_problem(self) -> tuple[str, str, int] | None: ...
    def oldest_s(self) -> float: ...
    def lines(self, last: int) -> list[str]: ...
    def fail(self, text: str) -> None: ...
    def failure(self) -> str: ...
    def failed_word(self) -> int:
        """Return the address of a word that the device reads: nonzero once the world has failed."""

    def rounds(self) -> int: ...
    def checks(self) -> bool: ...
    def fold(self, peers: Sequence[int], number: int, what: str) -> None: ...
    def set_checks(self, checks: bool) -> None: ...
    def set_remembered(self, most: int) -> None: ...
    def staging_bytes(self) -> int: ...
    def close(self, seconds: float) -> None: ...

class DeviceRound:
    """One stage of each of several movements, on a GPU."""

    def __init__(
        self,
        world: NcclWorld,
        signature: Signature | None,
        device: int,
        steps: Sequence[Any],
        current_stream: Callable[[], int],
        recorder: FlightRecorder | None = None,
        activity: Activity | None = None,
        failed: Failed | None = None,
    ) -> None: ...
    def run(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]: ...
    def run_like_last(self, x: torch.Tensor | None) -> torch.Tensor | None: ...

def device_missing() -> str: ...

class HostCommunicator:
    """Messages between processes of one node, or threads of one."""

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_s: float,
        rest: Callable[[], None] | None = None,
    ) -> None: ...
    def address(self) -> tuple[int, int]: ...
    def connect(self, addresses: Sequence[tuple[int, int]]) -> None: ...
    def begin(self, signature: Signature) -> None: ...
    def run(self, signature: Signature, calls: Sequence[tuple[BoundStage, int, int]]) -> None: ...
    def post_failure(self, text: str) -> bool: ...
    def failure(self) -> str: ...
    def reports(self) -> list[str]: ...
    def may_go_on(self) -> bool: ...
    def unfinished(self) -> list[tuple[bool, int, int, int, bytes, str]]: ...
    def posted(self, sends: bool, peer: int) -> int: ...
    def fold(self, peers: Sequence[int], number: int, what: str) -> None: ...
    def try_enter(self) -> bool: ...
    def leave(self) -> None: ...
    def close(self) -> None: ...
    def leave_to_parent(self) -> None: ...

class Round:
    """One stage of each of several movements."""

    def __init__(
        self,
        communicator: HostCommunicator | None,
        signature: Signature | None,
        steps: Sequence[Any],
        recorder: FlightRecorder | None = None,
        activity: Activity | None = None,
        failed: Failed | None = None,
    ) -> None: ...
    def run(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]: ...
    def run_like_last(self, x: torch.Tensor | None) -> torch.Tensor | None: ...

class Exchange:
    """Stages in flight together."""

    def __init__(
        self,
        communicator: HostCommunicator,
        signature: Signature,
        calls: Sequence[tuple[BoundStage, int, int]],
    ) -> None: ...
    def wait(self, call: int) -> None: ...

class Pieces:
    """One message in flight that consists of several pieces of memory."""

    def __init__(
        self,
        communicator: HostCommunicator,
        signature: Signature,
        sends: bool,
        peers: Sequence[int],
        pieces: Sequence[tuple[int, int]],
    ) -> None: ...
    def wait(self) -> None: ...

class SharedMemory:
    """Memory shared by several tensors."""

    def __init__(self, bytes: int, recycles: bool) -> None: ...
    def tensors(
        self,
        dtypes: Sequence[Dtype],
        shapes: Sequence[Sequence[int]],
        offsets: Sequence[int],
    ) -> list[object]:
        """Return DLPack capsules of contiguous tensors in this memory."""

def run_local(stage: BoundStage, input: int, output: int) -> None:
    """Run a stage that exchanges no messages."""

class NormLines:
    """Normalization of float32 blocks of one shape, line by line."""

    def __init__(
        self,
        lines: int,
        channels: int,
        cells: int,
        statistic_of: Sequence[int],
        statistics: int,
        count: float,
        eps: float,
        subtracts_mean: bool,
        parameters_of_cells: bool,
    ) -> None: ...
    def sums(self, x: int, sums: int) -> None: ...
    def normalize(self, x: int, totals: int, weight: int, bias: int, y: int) -> None: ...
    def gradient_sums(
        self,
        gradient: int,
        x: int,
        totals: int,
        weight: int,
        of_sums: int,
        of_weight: int,
        of_bias: int,
    ) -> None: ...
    def gradient(
        self, gradient: int, x: int, totals: int, of_totals: int, weight: int, of_x: int
    ) -> None: ...

class Draw(enum.Enum):
    """What is drawn for each cell."""

    kept = 0
    uniform = 1
    normal = 2
    bernoulli = 3
    scaled = 4

def draw(
    draw: Draw,
    dtype: Dtype,
    block: Sequence[int],
    start: Sequence[int],
    shape: Sequence[int],
    input_strides: Sequence[int],
    output_strides: Sequence[int],
    input: int,
    output: int,
    seed: int,
    call: int,
    stored_key: int,
    number: int,
    stores_key: int,
    dropped_below: int,
    factor: float,
    device: int,
    stream: int,
) -> None:
    """Draw the random numbers of a block's cells, on the host (device -1) or on a GPU's stream."""

def capture_id(stream: int) -> int:
    """Return the number of the capture of a stream into a CUDA graph; 0 if there is none."""

def random_key(seed: int, call: int) -> int:
    """Return the key of the numbers of a seed and a call."""

class NormWalk(enum.Enum):
    rows = 0
    columns = 1
    cells = 2

# Addresses of the weight and the bias, and their dtype.
_NormParameters = tuple[int, int, Dtype]
# Addresses of mean, variance and number of batches, momentum, and dtype of the first two.
_NormRunning = tuple[int, int, int, float, Dtype]

class DeviceNorm:
    """Normalization of blocks of one shape on a GPU."""

    workspace: int
    def __init__(
        self,
        library: str,
        device: int,
        walk: NormWalk,
        dtype: Dtype,
        result_dtype: Dtype,
        outer: int,
        channels: int,
        cells: int,
        groups: int,
        group_size: int,
        group_offset: int,
        shares_outer: bool,
        count: float,
        eps: float,
        subtracts_mean: bool,
    ) -> None: ...
    def sums(self, x: int, shifts: int, sums: int, workspace: int, stream: int) -> None: ...
    def normalize(
        self,
        x: int,
        totals: int,
        shifts: int,
        parameters: _NormParameters,
        y: int,
        running: _NormRunning,
        failed: int,
        stream: int,
    ) -> None: ...
    def gradient_sums(
        self,
        gradient: int,
        x: int,
        totals: int,
        shifts: int,
        parameters: _NormParameters,
        of_sums: int,
        of_parameters: _NormParameters,
        workspace: int,
        stream: int,
    ) -> None: ...
    def gradient(
        self,
        gradient: int,
        x: int,
        totals: int,
        shifts: int,
        of_totals: int,
        parameters: _NormParameters,
        of_x: int,
        failed: int,
        stream: int,
    ) -> None: ...

def recycled_tensor(shape: Sequence[int], dtype: Dtype) -> object:
    """Return a DLPack capsule of a contiguous tensor from the memory pool."""

def empty_recycling_pool() -> None:
    """Free the idle memory of the pool."""

def set_recycling_limit(bytes: int) -> None:
    """Limit the idle memory of the pool."""

def recycling_statistics() -> tuple[int, int, int, int, int]:
    """Return bytes in use, idle bytes, hits, misses and the limit of idle bytes."""

class _NcclInformation(TypedDict):
    path: str
    found: str
    version: int
    has_windows: bool
    has_shared_gpus: bool

class _CudaInformation(TypedDict):
    compiler_version: int
    driver_version: int
    device_count: int
    error: str

def nccl_information(path: str, wheel_paths: Sequence[str]) -> _NcclInformation:
    """Load NCCL if it is not loaded yet, and return its path, version and features."""

def cuda_information() -> _CudaInformation | None:
    """Return the versions of the kernels' compiler and of the driver, such as 12090 (0 if missing),
    the number of devices and the error if they cannot be counted; None in a build without CUDA."""
