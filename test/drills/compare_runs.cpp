// test/drills/compare_runs.cpp   What the drills ask about the files of runs.
//
//   compare_runs tensors A B BOUND          two files of --debug.dump_grads or --debug.dump_params have the same tensors, each within BOUND:
//                                           norm(difference) <= BOUND * norm(tensor of A) + 1e-7 * norm of all
//   compare_runs metrics A B BOUND KEY...   two metrics.jsonl have the same steps, and KEY within BOUND (relative) at each of them
//   compare_runs fields A POINTER...        every step of a metrics.jsonl has a number from 0 on at each JSON pointer, such as /exposed_s/dp
//   compare_runs trace A TRACK...           a timeline: valid JSON, its spans lie on named tracks and do not overlap within one, and every
//                                           TRACK has one
// One line on standard output. Exit code 0: yes; 1: no; 2: files that cannot be compared.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "checkpoint/safetensors.h"

using namespace trifold;

namespace {

using Json = nlohmann::json;
constexpr double floor_share = 1e-7;
constexpr double least_overlap_us = 0.3;  // microseconds since 1970, read as doubles, are multiples of a quarter

[[noreturn]] void give_up(const std::string& sentence) { throw Problem(Exit::data, sentence); }

struct Worst {
    double value = 0;
    std::string where = "nothing";
    void see(double v, const std::string& place) {
        if (std::isnan(v)) v = INFINITY;
        if (v >= value) value = v, where = place;
    }
    int verdict(const std::string& what, double bound) const {
        fmt::print("{}: {:.1e} at most{}\n", what, value, value <= bound ? "" : fmt::format(", allowed are {:.0e}: {}", bound, where));
        return value <= bound ? 0 : 1;
    }
};

double norm_of(const std::vector<float>& x) {
    double sum = 0;
    for (const float v : x) sum += static_cast<double>(v) * v;
    return std::sqrt(sum);
}

std::vector<float> values(const SafeTensor& t) {
    std::vector<float> out(static_cast<size_t>(t.elems));
    to_float(t, 0, t.elems, out.data());
    return out;
}

int tensors(const std::string& a, const std::string& b, double bound) {
    const SafetensorsFile left(a), right(b);
    if (left.tensors().empty() || left.tensors().size() != right.tensors().size())
        give_up(fmt::format("{} and {} have {} and {} tensors", a, b, left.tensors().size(), right.tensors().size()));
    double all = 0;
    for (const SafeTensor& t : left.tensors()) all = std::hypot(all, norm_of(values(t)));
    Worst worst;
    for (const SafeTensor& t : left.tensors()) {
        const SafeTensor* other = right.find(t.name);
        if (!other || other->shape != t.shape) give_up(fmt::format("{} has no tensor {} {}", b, t.name, shape_text(t.shape)));
        const std::vector<float> want = values(t);
        std::vector<float> difference = values(*other);
        for (size_t i = 0; i < want.size(); ++i) difference[i] -= want[i];
        const double norm = norm_of(want), beyond_floor = std::max(0.0, norm_of(difference) - floor_share * all);
        worst.see(beyond_floor == 0 ? 0 : beyond_floor / norm, t.name);
    }
    return worst.verdict(fmt::format("{} tensors", left.tensors().size()), bound);
}

std::vector<Json> lines_of(const std::string& path) {
    std::ifstream file(path);
    if (!file) give_up("cannot read " + path);
    std::vector<Json> lines;
    for (std::string line; std::getline(file, line);) {
        lines.push_back(Json::parse(line, nullptr, /*allow_exceptions=*/false));
        if (!lines.back().is_object() || !lines.back().contains("step")) give_up(path + ": this line is no record of a step: " + line);
    }
    return lines;
}

// step -> value, of the lines that have it.
std::map<int64_t, double> series(const std::string& path, const std::string& key) {
    std::map<int64_t, double> values;
    for (const Json& line : lines_of(path)) {
        if (!line.contains(key)) continue;
        if (!values.emplace(line["step"].get<int64_t>(), line[key].is_number() ? line[key].get<double>() : NAN).second)
            give_up(fmt::format("{} has step {} twice", path, line["step"].dump()));
    }
    return values;
}

int metrics(const std::string& a, const std::string& b, double bound, const std::vector<std::string>& keys) {
    Worst worst;
    size_t count = 0;
    for (const std::string& key : keys) {
        const auto left = series(a, key), right = series(b, key);
        if (left.empty() || left.size() != right.size()) give_up(fmt::format("{} and {} have {} and {} values of {}", a, b, left.size(), right.size(), key));
        for (const auto& [step, value] : left) {
            if (!right.contains(step)) give_up(fmt::format("{} has no {} of step {}", b, key, step));
            worst.see(std::abs(value - right.at(step)) / std::abs(value), fmt::format("{} of step {}", key, step));
        }
        count += left.size();
    }
    return worst.verdict(fmt::format("{} values", count), bound);
}

int fields(const std::string& path, const std::vector<std::string>& pointers) {
    int steps = 0;
    for (const Json& line : lines_of(path)) {
        if (!line.contains("loss")) continue;
        ++steps;
        for (const std::string& p : pointers) {
            const Json::json_pointer at(p);
            if (line.contains(at) && line[at].is_number() && line[at].get<double>() >= 0) continue;
            fmt::print("step {} has no number from 0 on at {}\n", line["step"].dump(), p);
            return 1;
        }
    }
    fmt::print("{} steps\n", steps);
    return steps > 0 ? 0 : 1;
}

int trace(const std::string& path, const std::vector<std::string>& tracks) {
    std::ifstream file(path);
    const Json events = Json::parse(file, nullptr, /*allow_exceptions=*/false);
    if (!events.is_array()) give_up(path + " is no JSON array");
    std::map<int64_t, std::string> name_of;
    std::map<int64_t, std::vector<std::pair<double, double>>> spans;  // by track: begin, end in microseconds
    for (const Json& e : events) {
        if (e.at("ph") == "M" && e.at("name") == "thread_name") name_of[e.at("tid")] = e.at("args").at("name");
        if (e.at("ph") == "X") spans[e.at("tid")].emplace_back(e.at("ts"), e.at("ts").get<double>() + e.at("dur").get<double>());
    }
    std::set<std::string> used;
    size_t count = 0;
    for (auto& [track, list] : spans) {
        if (!name_of.contains(track)) give_up(fmt::format("{}: track {} has no name", path, track));
        used.insert(name_of[track]);
        std::sort(list.begin(), list.end());
        for (size_t i = 1; i < list.size(); ++i)
            if (list[i].first < list[i - 1].second - least_overlap_us) {
                fmt::print("{}: two operations at once on track {}, for {} us\n", path, name_of[track], list[i - 1].second - list[i].first);
                return 1;
            }
        count += list.size();
    }
    for (const std::string& wanted : tracks)
        if (!used.contains(wanted)) {
            fmt::print("{} has no span on a track '{}'\n", path, wanted);
            return 1;
        }
    fmt::print("{} spans on {} tracks\n", count, used.size());
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    const std::vector<std::string> args(argv + std::min(argc, 2), argv + argc);
    const auto from = [&](size_t first) { return std::vector<std::string>(args.begin() + static_cast<int64_t>(first), args.end()); };
    try {
        if (mode == "tensors" && args.size() == 3) return tensors(args[0], args[1], std::stod(args[2]));
        if (mode == "metrics" && args.size() > 3) return metrics(args[0], args[1], std::stod(args[2]), from(3));
        if (mode == "fields" && args.size() > 1) return fields(args[0], from(1));
        if (mode == "trace" && args.size() > 1) return trace(args[0], from(1));
    } catch (const std::exception& e) {
        std::fprintf(stderr, "compare_runs: %s\n", e.what());
        return 2;
    }
    std::fprintf(stderr, "usage: compare_runs tensors A B BOUND | metrics A B BOUND KEY... | fields A POINTER... | trace A TRACK...\n");
    return 2;
}
