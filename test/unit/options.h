// test/unit/options.h   For the tests of options: what is refused, and with which sentence.
#pragma once
#include <string>
#include <vector>

#include "base/error.h"
#include "model/options.h"
#include "test/catch.h"

namespace trifold::test {

// The sentence of the Problem that `call` throws; empty when it throws none.
template <class Call>
std::string refusal(const Call& call) {
    try {
        call();
    } catch (const Problem& p) {
        CHECK(p.code() == Exit::usage);
        return p.what();
    }
    return "";
}
inline std::string refusal_of(const std::vector<std::string>& args) {
    return refusal([&] { parse_config(args); });
}
inline std::string refusal_of_json(const std::string& json) {
    return refusal([&] { config_from_json(json, "a.json"); });
}
inline std::string refusal_of_resolve(std::vector<std::string> args, int ranks = 1) {
    args.insert(args.begin(), "--model.preset=tiny-gpt2");
    return refusal([&] {
        Config c = parse_config(args);
        resolve(c, ranks);
    });
}
inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

inline Config resolved(const std::vector<std::string>& args, int ranks = 1, int local_ranks = 1) {
    Config c = parse_config(args);
    resolve(c, ranks, local_ranks);
    return c;
}

}  // namespace trifold::test
