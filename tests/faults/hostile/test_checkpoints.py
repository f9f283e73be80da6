"""A damaged checkpoint is refused or loads what was saved; nothing in it is executed."""

from __future__ import annotations

import copy
import os
import pickle
import pickletools
import random
import struct
import warnings
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from gpudist import checkpoint
from gpudist.checkpoint.reader import METADATA, SafeReader, read_pickled
from gpudist.errors import CheckpointError
from gpudist.transport.loopback import LoopbackTransport
from gpudist.world.partition import Partition
from tests.checkpoint.optimizers import assert_same_optimizer
from tests.faults.hostile.anything import EXAMPLES


def model() -> torch.nn.Module:
    return torch.nn.Linear(5, 3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model().state_dict()}, checkpoint_id=path)
    return path


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    P_world = Partition(LoopbackTransport.single(), [0])
    monkeypatch.setattr("gpudist.checkpoint.dcp.world_of", lambda module: P_world)


def damaged(draw: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        at, how = draw.randrange(len(changed)), draw.randrange(5)
        if how < 2:
            changed[at] ^= 1 << draw.randrange(8)
        elif how == 2:
            changed[at] = draw.choice(b"rqpjhJBXTG\x8d\x8e\x95\x94.(Rcb0\xff")
        elif how == 3:
            del changed[at : at + draw.randint(1, 9)]
        else:
            del changed[max(at, 1) :]
    return bytes(changed)


def loads(path: Path) -> bool:
    """Whether it is taken; raises what a reader must not raise."""
    try:
        checkpoint.load(model(), path)
    except CheckpointError:
        return False
    return True


def test_random_damage_to_the_index(saved: Path) -> None:
    """Some bytes of the index have no meaning; shapes and names of tensors do."""
    index = saved / METADATA
    whole = index.read_bytes()
    refused = 0
    for number in range(EXAMPLES):
        index.write_bytes(damaged(random.Random(number), whole))
        refused += not loads(saved)
    assert refused > EXAMPLES // 2


def test_random_damage_to_the_values(saved: Path) -> None:
    (values,) = saved.glob("*.distcp")
    whole = values.read_bytes()
    expected: Any = model()
    index = (saved / METADATA).read_bytes()
    checkpoint.load(expected, saved)
    for number in range(EXAMPLES):
        values.write_bytes(damaged(random.Random(number), whole))
        read: Any = model()
        try:
            checkpoint.load(read, saved)
        except CheckpointError:
            continue
        for name, value in read.state_dict().items():
            assert torch.equal(value, expected.state_dict()[name]), f"damage {number} to {name}"
    assert (saved / METADATA).read_bytes() == index


def test_one_bit_of_the_values(saved: Path) -> None:
    """Torch's own reader takes a number for another."""
    (values,) = saved.glob("*.distcp")
    whole = values.read_bytes()
    read: Any = model()
    checkpoint.load(read, saved)
    at = whole.index(read.weight.detach().numpy().tobytes())
    values.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(CheckpointError, match=r"is damaged: .+data/0"):
        checkpoint.load(model(), saved)
    options = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        checkpoint.load(model(), saved)  # as torch does
    finally:
        torch.serialization.set_crc32_options(options)


def test_damage_to_the_model_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    module: Any = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    checkpoint.save(module, tmp_path / "checkpoint", optimizer)
    (values,) = (tmp_path / "checkpoint").glob("*.distcp")
    whole = values.read_bytes()
    at = whole.index(module.weight.detach().numpy().tobytes())
    values.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.param_groups[0]["lr"] = 0.3
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=r"is damaged: .+data/0"):
        checkpoint.load(module, tmp_path / "checkpoint", optimizer)
    assert_same_optimizer(optimizer.state_dict(), before)


def test_state_of_another_shape_than_the_parameter(tmp_path: Path) -> None:
    module: Any = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    before = module.weight.detach().clone()
    state = {"weight": {"momentum_buffer": torch.zeros(5, 3)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"model": model().state_dict(), "optimizer": {"state": state}},
            checkpoint_id=tmp_path / "checkpoint",
        )
    with pytest.raises(CheckpointError, match=r"weight.momentum_buffer has shape \[5, 3\], not"):
        checkpoint.load(module, tmp_path / "checkpoint", optimizer)
    assert torch.equal(module.weight, before)


class Attack:
    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._path,)


def test_code_in_the_index_is_not_run(saved: Path, tmp_path: Path) -> None:
    (saved / METADATA).write_bytes(pickle.dumps(Attack(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match="may come from an attack"):
        checkpoint.load(model(), saved)
    assert not (tmp_path / "ran").exists()


class Taken:
    """Pickled as Python 3.11.0 to 3.11.3 pickles a member of an enumeration."""

    def __init__(self, of: Any, name: str) -> None:
        self._taken = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._taken


def test_what_the_index_takes_of_classes() -> None:
    """Members of enumerations, and nothing else."""
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert read_pickled(pickle.dumps(Taken(_MEM_FORMAT_ENCODING, member.name))) is member
    for of, name in ((PurePosixPath, "home"), (_MEM_FORMAT_ENCODING, "__doc__")):
        with pytest.raises(CheckpointError):
            read_pickled(pickle.dumps(Taken(of, name)))


def test_code_in_a_value_is_not_run(saved: Path, tmp_path: Path) -> None:
    (values,) = saved.glob("*.distcp")
    torch.save(Attack(tmp_path / "ran"), values)
    metadata = read_pickled((saved / METADATA).read_bytes())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, values.stat().st_size
    (saved / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError):
        checkpoint.load(model(), saved)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("offset", "length"), [(-1, 100), (0, 1 << 60), (1 << 60, 1), (0, -5)])
def test_values_beyond_their_file_are_refused(saved: Path, offset: int, length: int) -> None:
    metadata = read_pickled((saved / METADATA).read_bytes())
    for info in metadata.storage_data.values():
        info.offset, info.length = offset, length
    (saved / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError):
        checkpoint.load(model(), saved)


def test_an_index_makes_no_room_for_numbers_in_it() -> None:
    """One bit away from what is there: the pickler in C would make room for 2**31 objects."""
    data = b"\x80\x02N" + b"r" + struct.pack("<I", 2**31) + b"."
    with pytest.raises(CheckpointError, match=f"it numbers an object {2**31}"):
        read_pickled(data)


def tower(kind: type, height: int) -> Any:
    """Return 2**height objects that share their memory."""
    value: Any = kind()
    for _ in range(height):
        value = kind((value, value))
    return value


PLACES: dict[str, Any] = {
    "the index": lambda value: value,
    "a name": lambda value: Metadata({value: BytesStorageMetadata()}),
    "a dtype": lambda value: Metadata({"x": TensorStorageMetadata(value, torch.Size(), [])}),
    "a path": lambda value: Metadata({}, planner_data={"x": ("optimizer", value)}),
    "a file": lambda value: Metadata({}, storage_data={"x": _StorageInfo(value, 0, 1)}),
    "an identity": lambda value: Metadata({}, storage_meta=StorageMeta(save_id=value)),
}


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("place", list(PLACES))
def test_index_of_shared_objects_is_refused_at_once(saved: Path, place: str, kind: type) -> None:
    """Its text, its hash or a comparison would take for ever."""
    data = pickle.dumps(PLACES[place]("here"), 2)
    # The text "here" becomes a tower; pickle itself would hash it as a key.
    text = next(
        data[position or 0 : (position or 0) + 9]
        for opcode, argument, position in pickletools.genops(data)
        if argument == "here"
    )
    built = pickle.dumps(tower(kind, 100), 2)[2:-1]
    memo = max(int(argument or 0) for opcode, argument, _ in pickletools.genops(built + b".")
               if "PUT" in opcode.name)  # fmt: skip
    assert memo < 250
    (saved / METADATA).write_bytes(b"\x80\x02" + built + b"0" + data[2:].replace(text, built))
    assert (saved / METADATA).stat().st_size < 3000
    with pytest.raises(CheckpointError, match=r"\.metadata: .*more than 100 objects per byte"):
        checkpoint.load(model(), saved)


def test_value_of_shared_objects_is_refused_at_once(tmp_path: Path) -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    groups = [{"params": tower(tuple, 60)}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"model": model().state_dict(), "optimizer": {"param_groups": groups}},
            checkpoint_id=tmp_path / "checkpoint",
        )
    with pytest.raises(CheckpointError, match="more than 100 objects per byte"):
        checkpoint.load(module, tmp_path / "checkpoint", optimizer)


@pytest.mark.parametrize("kind", ["FIFO", "symbolic link"])
@pytest.mark.parametrize("which", ["values", "index"])
def test_files_must_be_regular(tmp_path: Path, kind: str, which: str) -> None:
    """Opening a FIFO waits for its writer; a link leads out of the folder."""
    checkpoint.save(model(), tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / ("__0_0.distcp" if which == "values" else METADATA)
    file.rename(tmp_path / "moved")
    if kind == "FIFO":
        os.mkfifo(file)
    else:
        file.symlink_to(tmp_path / "moved")
    words = rf"{file.name} is a {kind}.*; it must be a regular file: replace it by a copy"
    if (kind, which) == ("FIFO", "index"):
        words = "does not contain a checkpoint"
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(model(), tmp_path / "checkpoint")


def test_tensor_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    """A group has tensors of any shape, which would be allocated first."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=torch.tensor(0.1))
    checkpoint.save(module, tmp_path / "checkpoint", optimizer)
    metadata = read_pickled((tmp_path / "checkpoint" / METADATA).read_bytes())
    about = metadata.state_dict_metadata["optimizer.param_groups.0.lr"]
    about.size = torch.Size([2**40])
    about.chunks[0].offsets, about.chunks[0].sizes = torch.Size([0]), about.size
    metadata.storage_data = {
        MetadataIndex(at.fqn, torch.Size([0]) if at.fqn.endswith("lr") else at.offset): info
        for at, info in metadata.storage_data.items()
    }
    (tmp_path / "checkpoint" / METADATA).write_bytes(pickle.dumps(metadata))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match=r"lr of shape \[1099511627776\] has \d+ bytes"):
            checkpoint.load(module, tmp_path / "checkpoint", optimizer)


def chunks(*ranges: tuple[int, int]) -> Metadata:
    about = TensorStorageMetadata(
        TensorProperties(torch.float32),
        torch.Size([4]),
        [ChunkStorageMetadata(torch.Size([a]), torch.Size([b - a])) for a, b in ranges],
    )
    return Metadata({"x": about})


@pytest.mark.parametrize(
    "ranges",
    [[(0, 3)], [], [(0, 2), (0, 2)], [(0, 2), (2, 5)], [(1, 5)], [(0, 4), (4, 5)]],
)
def test_parts_that_do_not_make_up_a_tensor_are_refused(
    ranges: list[tuple[int, int]], tmp_path: Path
) -> None:
    (tmp_path / METADATA).write_bytes(pickle.dumps(chunks(*ranges)))
    with pytest.raises(CheckpointError, match=r"parts of x do not make up its shape \[4\]"):
        SafeReader(tmp_path).read_metadata()
    (tmp_path / METADATA).write_bytes(pickle.dumps(chunks((0, 2), (2, 2), (2, 4))))
    SafeReader(tmp_path).read_metadata()
