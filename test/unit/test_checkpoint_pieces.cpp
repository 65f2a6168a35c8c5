// test/unit/test_checkpoint_pieces.cpp   Pieces of tensors: their names, what two of them share, loading into another
// layout.
#include "test/catch.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "test/unit/fake_run.h"

using namespace trifold;
namespace fs = std::filesystem;

TEST_CASE("names of pieces") {
    const Piece piece{"layers.0.attention.q.weight", StateKind::m, {{0, 64}, {32, 128}}, 5, 1000};
    CHECK(key_of(piece) == "m/layers.0.attention.q.weight[0:32,64:128]@5:1000");
    CHECK(piece_of(key_of(piece)) == piece);
    for (const char* bad :
         {"", "m/", "m/a", "x/a[0:1]@0:1", "m/[0:1]@0:1", "m/a[]@0:1", "m/a[0:1]", "m/a[0:1]@0:2", "m/a[1:0]@0:0",
          "m/a[0:1]@0:1 ", "m/a[0:1,]@0:1", "m/a[-1:1]@0:1", "m/a[0:99999999999999999999]@0:1"}) {
        INFO(bad);
        CHECK_THROWS_AS(piece_of(bad), Problem);
    }
}

TEST_CASE("what two pieces share is the same as element by element") {
    std::mt19937 random(5);
    const auto number = [&](int64_t below) { return static_cast<int64_t>(random() % static_cast<uint32_t>(below)); };
    const auto any_piece = [&](const std::vector<int64_t>& shape) {
        Piece p{"t", StateKind::v, {}, 0, 1};
        int64_t volume = 1;
        for (const int64_t size : shape) {
            const bool whole = number(3) == 0;
            const int64_t begin = whole ? 0 : number(size), end = whole ? size : begin + 1 + number(size - begin);
            p.box.begin.push_back(begin);
            p.box.end.push_back(end);
            volume *= end - begin;
        }
        p.first = number(volume);
        p.last = p.first + 1 + number(volume - p.first);
        if (number(3) == 0) p.first = 0, p.last = volume;
        return p;
    };
    // the global index of every element of a piece
    const auto elements = [](const Piece& p, const std::vector<int64_t>& shape) {
        std::vector<int64_t> all;
        for (int64_t e = p.first; e < p.last; ++e) {
            int64_t global = 0, rest = e, scale = 1;
            for (size_t d = shape.size(); d-- > 0;) {
                const int64_t extent = p.box.end[d] - p.box.begin[d];
                global += (p.box.begin[d] + rest % extent) * scale;
                rest /= extent;
                scale *= shape[d];
            }
            all.push_back(global);
        }
        return all;
    };
    for (int trial = 0; trial < 5000; ++trial) {
        std::vector<int64_t> shape(static_cast<size_t>(1 + number(3)));
        for (int64_t& size : shape) size = 1 + number(7);
        const Piece stored = any_piece(shape), wanted = any_piece(shape);
        const auto have = elements(stored, shape), want = elements(wanted, shape);
        std::vector<int64_t> expected(want.size(), -1), filled(want.size(), -1);
        for (size_t i = 0; i < want.size(); ++i)
            if (const auto it = std::find(have.begin(), have.end(), want[i]); it != have.end())
                expected[i] = it - have.begin();
        for (const SharedRun& run : shared_runs(stored, wanted))
            for (int64_t i = 0; i < run.count; ++i) {
                REQUIRE(filled.at(static_cast<size_t>(run.to + i)) == -1);
                filled[static_cast<size_t>(run.to + i)] = run.from + i;
            }
        REQUIRE(filled == expected);
    }
    // whole rows of equal width are one run
    CHECK(shared_runs({"t", {}, {{0, 0}, {8, 6}}, 0, 48}, {"t", {}, {{2, 0}, {5, 6}}, 0, 18}) ==
          std::vector<SharedRun>{{12, 0, 18}});
}

TEST_CASE("a checkpoint loads into another layout") {
    const TemporaryFolder folder;
    const std::string path = save(folder.path(), 4).path;
    const FakeRun run(4);
    const Manifest manifest = read_manifest(path);
    // Columns split over two tensor-parallel ranks, each box over three data-parallel ranks.
    const Parameter& p = run.table.at("layers.0.ffn.down.weight");
    const int64_t rows = p.shape[0], columns = p.shape[1], half = columns / 2;
    for (int64_t tp = 0; tp < 2; ++tp) {
        std::vector<float> box(static_cast<size_t>(rows * half));
        std::vector<PieceInMemory> wanted;
        for (int64_t dp = 0; dp < 3; ++dp) {
            const int64_t first = dp * rows * half / 3, last = (dp + 1) * rows * half / 3;
            wanted.push_back(
                {{p.name, StateKind::v, {{0, tp * half}, {rows, (tp + 1) * half}}, first, last}, box.data() + first});
        }
        read_pieces(path, manifest, wanted, {});
        int64_t wrong = 0;
        for (int64_t r = 0; r < rows; ++r)
            wrong += std::memcmp(&box[static_cast<size_t>(r * half)],
                                 &run.v[static_cast<size_t>(p.offset + r * columns + tp * half)],
                                 static_cast<size_t>(half) * 4) != 0;
        CHECK(wrong == 0);
    }
    std::vector<float> more(static_cast<size_t>(rows * columns + columns));
    const PieceInMemory too_much{{p.name, StateKind::v, {{0, 0}, {rows + 1, columns}}, 0, (rows + 1) * columns},
                               more.data()};
    CHECK(has(problem_of([&] { read_pieces(path, manifest, {too_much}, {}); }),
              "has 240 of the 260 elements of v/layers.0.ffn.down.weight"));
    const PieceInMemory unknown{{"nothing", StateKind::v, {{0}, {1}}, 0, 1}, more.data()};
    CHECK(has(problem_of([&] { read_pieces(path, manifest, {unknown}, {}); }), "has 0 of the 1 elements"));
}
