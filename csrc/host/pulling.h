// Reading large messages from the sender's memory. Instead of sending its cells, the sender offers
// their addresses (a loan), and the receiver copies them with process_vm_readv: one copy instead of
// two. The system must permit reading another process's memory.
#pragma once

#include <sys/types.h>

#include <cstdint>

#include "core/transfer.h"

namespace gpudist {

// Return whether this process reads `expected` at `address` of process `pid`.
bool can_pull(pid_t pid, uint64_t address, uint64_t expected);

// Return whether a loan is faster than sending.
bool worth_lending(const Transfer& send);

// Write the location of the cells into `slot`, behind the header. Cells in short rows are packed
// first.
void write_loan(Transfer& send, char* slot);
void read_loan(const char* slot, Transfer& receive);

// Read the next bytes, at most `bytes`. Returns how many were read: 0 if the sender is gone, and
// possibly fewer than `bytes` because one system call takes a limited number of rows.
int64_t pull(pid_t pid, Transfer& receive, int64_t bytes);

}  // namespace gpudist
