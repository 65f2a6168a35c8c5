// test/emulation/symbols.h   Names of functions and places in the running program, for messages.
#pragma once
#include <cstdint>
#include <string>

namespace trifold::emulation {

// "layernorm_forward<float>" for the address of a function, read from the program's symbol table. Kept for ever.
const char* function_name(const void* function);
// "norm.cu:17 in block_sum, norm.cu:40 in layernorm_forward" for the address of an instruction, innermost call first.
std::string source_of(uintptr_t instruction);
// Where the program lies in memory: addresses minus this are the same in every run.
uintptr_t program_base();

}  // namespace trifold::emulation
