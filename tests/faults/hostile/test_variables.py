"""Any environment gives a consistent launch, or one clear error."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from gpudist.errors import TransportError
from gpudist.transport import TRANSPORTS
from gpudist.world.launch import Built, choose_transport, launch_of, settings_of
from tests.faults.hostile.anything import EXAMPLES

WHOLE = Built("", "there are no GPUs", 0)
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
NAMES = [
    *TORCHRUN, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES",
    "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID",
    "GPUDIST_TRANSPORT", "GPUDIST_CHECK",
]  # fmt: skip
numbers = st.integers(-1, 5).map(str) | st.sampled_from(["0", "1", "4", "70000", "9" * 5000])
texts = numbers | st.text(max_size=5) | st.sampled_from(["", " 1", "1_0", "٣", "1e0", *TRANSPORTS])
environments = st.dictionaries(st.sampled_from(NAMES), texts, max_size=8)


@settings(max_examples=5 * EXAMPLES, deadline=None)
@given(said=environments, base=st.sampled_from([{}, TORCHRUN]))
def test_any_environment(said: dict[str, str], base: dict[str, str]) -> None:
    environment = {**base, **said}
    asked = settings_of(environment, WHOLE)
    try:
        launch = launch_of(environment)
        transport, _ = choose_transport(launch, environment, WHOLE)
    except TransportError as error:
        assert asked.transport == "none" and asked.reason == str(error)
        # It names the variable that is wrong, and does not repeat a text of any length.
        assert any(name in str(error) for name in (*NAMES, "LOCAL_SIZE", "MPI_LOCALNRANKS"))
        assert len(str(error)) < 500
        return
    assert asked.transport == transport in TRANSPORTS
    assert 0 <= launch.local_rank < launch.local_size <= launch.size
    assert 0 <= launch.rank < launch.size
    assert 0 < launch.port < 2**16 and launch.address


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RANK", "one"),
        ("RANK", "٣"),
        ("RANK", "4"),
        ("RANK", "-1"),
        ("WORLD_SIZE", ""),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "9" * 5000),
        ("LOCAL_WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "5"),
        ("LOCAL_RANK", "2"),
        ("LOCAL_RANK", "-1"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("MASTER_ADDR", ""),
        ("MASTER_ADDR", "node\udcff"),
        ("TORCHELASTIC_RUN_ID", "job \udce9"),
        ("SLURM_JOB_ID", "\udcff"),
        ("GPUDIST_TRANSPORT", "mpi"),
        ("GPUDIST_TRANSPORT", "loopback"),
        ("GPUDIST_CHECK", "yes"),
    ],
)
def test_each_malformed_variable_is_named(name: str, text: str) -> None:
    environment = {**TORCHRUN, name: text}
    with pytest.raises(TransportError, match=name):
        choose_transport(launch_of(environment), environment, WHOLE)


def test_srun_says_the_most_that_a_node_may_get() -> None:
    said = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "4"}
    said["SLURM_STEP_ID"] = "0"
    assert launch_of(said).local_size == 2 and launch_of(said).same_node
