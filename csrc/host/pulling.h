// Large messages are not sent: the sender lends its tensor, and the receiver reads from it, which
// is one copy instead of two. Needs the system's leave to read another process's memory.
#pragma once

#include <sys/types.h>

#include <cstdint>

#include "core/transfer.h"

namespace gpudist {

// Whether this process may read `expected` at `address` of process `pid`.
bool can_pull(pid_t pid, uint64_t address, uint64_t expected);

// Whether lending is quicker than sending.
bool worth_lending(const Transfer& send);

// Describe to the receiver, behind the header in `slot`, where the cells are. Cells in short rows
// are packed first.
void write_loan(Transfer& send, char* slot);
void read_loan(const char* slot, Transfer& receive);

// Read the next at most `bytes`; how many came, less at the end of what can be done in one go.
// Zero if the lender is gone.
int64_t pull(pid_t pid, Transfer& receive, int64_t bytes);

}  // namespace gpudist
