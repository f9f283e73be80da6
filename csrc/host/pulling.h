// Reading large messages from the sender's memory. Instead of sending its cells, the sender offers
// their addresses (a loan), and the receiver copies them: one copy instead of two. From another
// process they come by process_vm_readv, which the system must permit.
#pragma once

#include <sys/types.h>

#include <cstdint>

#include "core/transfer.h"

namespace gpudist {

// Return whether this process reads `expected` at `address` of process `pid`.
bool can_pull(pid_t pid, uint64_t address, uint64_t expected);

// Return whether a loan is faster than sending; `is_here`: to a rank of this process.
bool worth_lending(const Transfer& send, bool is_here);

// Write the location of the cells into `slot`, behind the header. Cells in short rows are packed
// first, unless the reader is in this process.
void write_loan(Transfer& send, char* slot, bool is_here);
void read_loan(const char* slot, Transfer& receive);

// Read the next bytes, at most `bytes`. Returns how many were read: 0 if the sender is gone, and
// possibly fewer than `bytes` because one system call takes a limited number of rows.
int64_t pull(pid_t pid, Transfer& receive, int64_t bytes);
// The same from a rank of this process.
int64_t pull_here(Transfer& receive, int64_t bytes);

}  // namespace gpudist
