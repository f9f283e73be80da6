// Table of opcodes, by name without cache and memory-order modifiers.
#pragma once

#include <map>
#include <string>

#include "machine.h"

namespace gpudist::ptx {

struct Opcode {
  Step step;
  int operands;  // number of slots
};

const std::map<std::string, Opcode>& opcodes();

}  // namespace gpudist::ptx
