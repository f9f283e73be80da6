"""Transports: NCCL, shared memory, gloo, loopback and dry runs behind one protocol."""

# Description of each transport, by the name that users read and set.
TRANSPORTS = {
    "nccl": "between GPUs",
    "host": "between processes of one node",
    "gloo": "between nodes without GPUs",
    "loopback": "threads of one process",
}
