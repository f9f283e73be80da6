// What each opcode does, by its name without hints of caches and memory order.
#pragma once

#include <map>
#include <string>

#include "machine.h"

namespace gpudist::ptx {

struct Opcode {
  Step step;
  int operands;  // slots it uses
};

const std::map<std::string, Opcode>& opcodes();

}  // namespace gpudist::ptx
