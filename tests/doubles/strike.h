// Fault that strikes a rank in the middle of an operation.
#pragma once

namespace gpudist::doubles {

// Run the armed fault once; returns false if none is armed.
bool strike();

}  // namespace gpudist::doubles
