// test/golden/compare.cpp   Compares a run of trifold with what Hugging Face transformers computed (make_golden.py).
//
//   golden_compare check EXPECTED GRADS PARAMS METRICS   losses, gradient norms, gradients, parameters after the last
//   step golden_compare losses METRICS_A METRICS_B            two precisions: close at every step, and both go down
//   golden_compare alter EXPECTED OUT PREFIX             scales the first tensor named PREFIX... by 1.001, for negative
//   controls
//
// A tensor is within b when norm(difference) <= b * norm(expected) + 1e-7 * norm of all tensors. Parameters are
// compared with q, k and v together: Adam turns the rounding noise of gradients that are zero in exact arithmetic into
// steps. Exit code 0: within all bars; 1: not; 2: files that cannot be compared.
#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "checkpoint/safetensors.h"

using namespace trifold;

namespace {

constexpr double loss_bar = 1e-5, grad_norm_bar = 1e-4, grad_bar = 1e-4, param_bar = 1e-4, floor_share = 1e-7;
constexpr double dtype_bar = 1e-2;   // bf16 against fp32
constexpr double least_drop = 0.02;  // of the mean loss, first to last five steps

[[noreturn]] void give_up(const std::string& sentence) { throw Problem(Exit::data, sentence); }

struct Worst {
    double value = 0;  // measured / bar: above 1 is a failure
    double relative = 0;
    std::string name;
    void see(const std::string& what, double difference, double relative_to, double allowed) {
        const double v = difference / allowed;
        const bool worse = std::isnan(v) || v > value || name.empty();
        if (worse && !std::isnan(value)) *this = {v, difference / relative_to, what};
    }
    bool ok() const { return value <= 1; }
};

std::vector<float> values(const SafeTensor& t) {
    std::vector<float> out(static_cast<size_t>(t.elems));
    to_float(t, 0, t.elems, out.data());
    return out;
}

double square_sum(const std::vector<float>& x) {
    double sum = 0;
    for (const float v : x) sum += static_cast<double>(v) * v;
    return sum;
}

// model.layers.0.self_attn.k_proj.weight -> model.layers.0.self_attn.qkv_proj.weight
std::string fused_name(std::string name) {
    for (const char* part : {".q_proj.", ".k_proj.", ".v_proj."})
        if (const size_t at = name.find(part); at != std::string::npos) name.replace(at, 8, ".qkv_proj.");
    return name;
}

struct Norms {
    double difference = 0, expected = 0;  // squared
};

// `got` holds the tensors of `expected` that start with `prefix`, and no others.
Worst compare_tensors(const SafetensorsFile& expected, const SafetensorsFile& got, const std::string& prefix,
                      double bar, bool fuse) {
    std::map<std::string, Norms> groups;
    double global = 0;
    size_t count = 0;
    for (const SafeTensor& t : expected.tensors()) {
        if (!t.name.starts_with(prefix)) continue;
        const std::string name = t.name.substr(prefix.size());
        const SafeTensor* other = got.find(name);
        if (!other) give_up(fmt::format("{} has no tensor {}", got.path(), name));
        if (other->shape != t.shape)
            give_up(fmt::format("{}: {} is {}, expected {}", got.path(), name, shape_text(other->shape),
                                shape_text(t.shape)));
        const std::vector<float> want = values(t);
        std::vector<float> difference = values(*other);
        for (size_t i = 0; i < want.size(); ++i) difference[i] -= want[i];
        Norms& group = groups[fuse ? fused_name(name) : name];
        group.difference += square_sum(difference);
        group.expected += square_sum(want);
        global += square_sum(want);
        ++count;
    }
    if (count == 0) give_up(fmt::format("{} has no tensor that starts with {}", expected.path(), prefix));
    if (count != got.tensors().size())
        give_up(fmt::format("{} has {} tensors, expected {}", got.path(), got.tensors().size(), count));
    Worst worst;
    for (const auto& [name, n] : groups) {
        const double norm = std::sqrt(n.expected), floor = floor_share * std::sqrt(global);
        worst.see(name, std::sqrt(n.difference), norm, bar * norm + floor);
    }
    return worst;
}

// One number of every training step in metrics.jsonl (evaluation lines have other keys).
std::vector<double> metric(const std::string& path, const char* key) {
    std::ifstream file(path);
    if (!file) give_up("cannot read " + path);
    std::vector<double> out;
    for (std::string line; std::getline(file, line);) {
        const nlohmann::json json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
        if (json.is_discarded()) give_up(path + ": this line is no JSON: " + line);
        if (json.contains("loss") && json.contains(key))
            out.push_back(json[key].is_number() ? json[key].get<double>() : NAN);
    }
    return out;
}

Worst compare_series(const SafetensorsFile& expected, const char* name, const std::vector<double>& got, double bar) {
    const SafeTensor* want = expected.find(name);
    if (!want) give_up(fmt::format("{} has no tensor {}", expected.path(), name));
    if (static_cast<int64_t>(got.size()) != want->elems)
        give_up(fmt::format("{} steps in the metrics, expected {}", got.size(), want->elems));
    const std::vector<float> values_f = values(*want);
    Worst worst;
    for (size_t i = 0; i < got.size(); ++i)
        worst.see(fmt::format("step {}", i + 1), std::abs(got[i] - values_f[i]), values_f[i], bar * values_f[i]);
    return worst;
}

int check(const std::vector<std::string>& files) {
    const SafetensorsFile expected(files[0]), grads(files[1]), params(files[2]);
    const std::string& metrics = files[3];
    const std::pair<const char*, Worst> results[] = {
        {"loss", compare_series(expected, "losses", metric(metrics, "loss"), loss_bar)},
        {"grad norm", compare_series(expected, "grad_norms", metric(metrics, "grad_norm"), grad_norm_bar)},
        {"grad", compare_tensors(expected, grads, "grad/", grad_bar, /*fuse=*/false)},
        {"param", compare_tensors(expected, params, "param/", param_bar, /*fuse=*/true)}};
    bool ok = true;
    for (const auto& [what, worst] : results) {
        fmt::print("{} {:.1e}{}  ", what, worst.relative, worst.ok() ? "" : fmt::format(" FAILED ({})", worst.name));
        ok = ok && worst.ok();
    }
    fmt::print("\n");
    return ok ? 0 : 1;
}

double mean(const std::vector<double>& x, size_t first, size_t count) {
    double sum = 0;
    for (size_t i = first; i < first + count; ++i) sum += x[i];
    return sum / static_cast<double>(count);
}

int compare_losses(const std::vector<std::string>& files) {
    const std::vector<double> a = metric(files[0], "loss"), b = metric(files[1], "loss");
    if (a.size() != b.size() || a.size() < 10)
        give_up(fmt::format("{} and {} steps cannot be compared", a.size(), b.size()));
    Worst worst;
    for (size_t i = 0; i < a.size(); ++i)
        worst.see(fmt::format("step {}", i + 1), std::abs(a[i] - b[i]), a[i], dtype_bar * a[i]);
    const double drop_a = 1 - mean(a, a.size() - 5, 5) / mean(a, 0, 5),
                 drop_b = 1 - mean(b, b.size() - 5, 5) / mean(b, 0, 5);
    const bool falling = drop_a >= least_drop && drop_b >= least_drop;
    fmt::print("loss apart by at most {:.1e}{}, falls by {:.1f} % and {:.1f} %{}\n", worst.relative,
               worst.ok() ? "" : fmt::format(" FAILED ({})", worst.name), 100 * drop_a, 100 * drop_b,
               falling ? "" : " FAILED");
    return worst.ok() && falling ? 0 : 1;
}

template <class T>
std::vector<std::byte> scaled(const SafeTensor& t) {
    std::vector<std::byte> out(t.data, t.data + t.bytes);
    for (size_t at = 0; at < out.size(); at += sizeof(T)) {
        T x;
        std::memcpy(&x, out.data() + at, sizeof x);
        x = static_cast<T>(x * 1.001);
        std::memcpy(out.data() + at, &x, sizeof x);
    }
    return out;
}

int alter(const std::vector<std::string>& files) {
    const SafetensorsFile in(files[0]);
    std::vector<SafetensorsWriter::Entry> entries;
    for (const SafeTensor& t : in.tensors()) entries.push_back({t.name, t.type, t.shape});
    SafetensorsWriter out(files[1], entries);
    bool done = false;
    for (const SafeTensor& t : in.tensors()) {
        const bool chosen = !done && t.name.starts_with(files[2]);
        done = done || chosen;
        const std::vector<std::byte> data = !chosen                   ? std::vector<std::byte>(t.data, t.data + t.bytes)
                                            : t.type == SafeType::f64 ? scaled<double>(t)
                                                                      : scaled<float>(t);
        out.write(data.data(), static_cast<int64_t>(data.size()));
    }
    if (!done) give_up(fmt::format("{} has no tensor that starts with {}", files[0], files[2]));
    out.finish();
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    const std::vector<std::string> files(argv + std::min(argc, 2), argv + argc);
    try {
        if (mode == "check" && files.size() == 4) return check(files);
        if (mode == "losses" && files.size() == 2) return compare_losses(files);
        if (mode == "alter" && files.size() == 3) return alter(files);
    } catch (const Problem& problem) {
        std::fprintf(stderr, "golden_compare: %s\n", problem.what());
        return 2;
    }
    std::fprintf(
        stderr, "usage: golden_compare check EXPECTED GRADS PARAMS METRICS | losses A B | alter EXPECTED OUT PREFIX\n");
    return 2;
}
