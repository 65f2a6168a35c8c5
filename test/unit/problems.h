// test/unit/problems.h   What a refusal said.
#pragma once
#include "test/catch.h"

#include <string>

#include "base/error.h"

// The sentence of the Problem that `act` throws, which must have this exit code; empty when it throws none.
template <class Act>
std::string problem_of(Act act, trifold::Exit code = trifold::Exit::checkpoint) {
    try {
        act();
    } catch (const trifold::Problem& e) {
        CHECK(e.code() == code);
        return e.what();
    }
    return "";
}

// Whether the text contains the part; when not, both are shown with the failing CHECK.
inline bool has(const std::string& text, const std::string& part) {
    const bool found = text.find(part) != std::string::npos;
    if (!found) UNSCOPED_INFO("said: " << text << "\nwanted: " << part);
    return found;
}
