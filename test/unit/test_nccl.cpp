// test/unit/test_nccl.cpp   NcclCollectives against a fake NCCL that computes and checks: numbers and life cycle.
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <future>
#include <map>
#include <numeric>
#include <thread>

#include "parallel/nccl.h"
#include "test/catch.h"
#include "test/fake_nccl/fake_nccl.h"
#include "test/fake_nccl/ranks.h"
#include "test/unit/operands.h"

using namespace trifold;
using test::Operand;
using test::Values;

namespace {

// body(group, rank) on all ranks of a group 'dp'.
Outcome on_group(int size, const std::function<void(NcclCollectives&, int)>& body, NcclOptions options = {10, 10}) {
    Ids ids;
    Outcome outcome;
    outcome.sentences = on_threads(size, [&](int rank) {
        NcclCollectives group(fake_nccl::api(), {.name = "dp", .rank = rank, .size = size, .key = "dp/0"}, ids.ids(), options);
        body(group, rank);
    });
    outcome.findings = fake_nccl::take_findings();
    return outcome;
}

// Element i of rank r: small integers, so that sums are exact in every type.
double element(int rank, int64_t i) { return static_cast<double>((rank * 7 + i * 3) % 23); }
Operand of_rank(DType type, int rank, int64_t elems, int64_t first = 0) {
    Operand x(type, elems);
    for (int64_t i = 0; i < elems; ++i) x.set(i, element(rank, first + i));
    return x;
}

const DType types[] = {DType::f32, DType::bf16, DType::f64, DType::i32, DType::u8};

}  // namespace

TEST_CASE("every collective through the fake NCCL, on 1 to 4 ranks and in all types", "[nccl]") {
    const int aborted = fake_nccl::communicators().aborted;
    for (int size = 1; size <= 4; ++size)
        for (const DType type : types) {
            CAPTURE(size, name_of(type));
            const int64_t n = 33, all = n * size;
            std::vector<Operand> gathered(static_cast<size_t>(size)), gathered_in_place = gathered, scattered = gathered, scattered_in_place = gathered, sums = gathered, maxima = gathered,
                                 broadcasts = gathered;
            const Outcome outcome = on_group(size, [&](NcclCollectives& group, int rank) {
                const auto slot = static_cast<size_t>(rank);
                Operand shard = of_rank(type, rank, n), full = of_rank(type, rank, all);
                gathered[slot] = Operand(type, all);
                group.all_gather(nullptr, shard.tensor(), gathered[slot].tensor());
                gathered_in_place[slot] = Operand(type, all);
                const Tensor own = gathered_in_place[slot].tensor().slice(rank * n, n);
                std::copy(shard.bytes().begin(), shard.bytes().end(), static_cast<std::byte*>(own.data));
                group.all_gather(nullptr, own, gathered_in_place[slot].tensor());

                scattered[slot] = Operand(type, n);
                group.reduce_scatter(nullptr, full.tensor(), scattered[slot].tensor());
                scattered_in_place[slot] = full;
                group.reduce_scatter(nullptr, scattered_in_place[slot].tensor(), scattered_in_place[slot].tensor().slice(rank * n, n));

                sums[slot] = maxima[slot] = broadcasts[slot] = full;
                group.all_reduce(nullptr, sums[slot].tensor());
                group.all_reduce_max(nullptr, maxima[slot].tensor());
                group.broadcast(nullptr, broadcasts[slot].tensor(), size - 1);

                Operand nothing(type, 0);
                group.all_gather(nullptr, nothing.tensor(), nothing.tensor());
                group.all_reduce(nullptr, nothing.tensor());
            });
            REQUIRE(outcome.all() == "");
            Values gather, sum, max;
            for (int64_t i = 0; i < all; ++i) {
                gather.push_back(element(static_cast<int>(i / n), i % n));
                double total = 0, largest = 0;
                for (int r = 0; r < size; ++r) {
                    total += element(r, i);
                    largest = std::max(largest, element(r, i));
                }
                sum.push_back(total);
                max.push_back(largest);
            }
            for (int r = 0; r < size; ++r) {
                const auto slot = static_cast<size_t>(r);
                CHECK(gathered[slot].values() == gather);
                CHECK(gathered_in_place[slot].values() == gather);
                CHECK(scattered[slot].values() == test::slice(sum, r * n, n));
                CHECK(test::slice(scattered_in_place[slot].values(), r * n, n) == test::slice(sum, r * n, n));
                CHECK(sums[slot].values() == sum);
                CHECK(maxima[slot].values() == max);
                CHECK(broadcasts[slot].values() == of_rank(type, size - 1, all).values());
            }
        }
    CHECK((fake_nccl::communicators().open == 0 && fake_nccl::communicators().aborted == aborted));
}

TEST_CASE("messages: a ring of exchanges, a line of sends, an all-to-all with empty parts", "[nccl]") {
    for (int size = 2; size <= 4; ++size)
        for (const DType type : {DType::f32, DType::bf16}) {
            CAPTURE(size, name_of(type));
            std::vector<Operand> ring(static_cast<size_t>(size)), line = ring, mixed = ring;
            const auto count = [](int from, int to) { return static_cast<int64_t>((from * 5 + to * 3) % 4); };  // 0 .. 3
            const Outcome outcome = on_group(size, [&](NcclCollectives& group, int rank) {
                const auto slot = static_cast<size_t>(rank);
                const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
                Operand x = of_rank(type, rank, 17);
                ring[slot] = Operand(type, 17);
                group.exchange(nullptr, next, x.tensor(), previous, ring[slot].tensor());
                // Ends of the line have one side only.
                line[slot] = Operand(type, 17);
                group.exchange(nullptr, next, rank + 1 < size ? x.tensor() : Tensor{}, previous, rank > 0 ? line[slot].tensor() : Tensor{});
                if (rank == 0) group.send(nullptr, 1, x.tensor());
                if (rank == 1) group.receive(nullptr, 0, line[slot].tensor());

                std::vector<int64_t> to, from;
                for (int r = 0; r < size; ++r) {
                    to.push_back(count(rank, r));
                    from.push_back(count(r, rank));
                }
                Operand parts = of_rank(type, rank, std::accumulate(to.begin(), to.end(), int64_t{0}), 100);
                mixed[slot] = Operand(type, std::accumulate(from.begin(), from.end(), int64_t{0}));
                group.all_to_all(nullptr, parts.tensor(), to, mixed[slot].tensor(), from);
                Operand nothing(type, 0);
                const std::vector<int64_t> none(static_cast<size_t>(size), 0);
                group.all_to_all(nullptr, nothing.tensor(), none, nothing.tensor(), none);
            });
            REQUIRE(outcome.all() == "");
            for (int r = 0; r < size; ++r) {
                const auto slot = static_cast<size_t>(r);
                CHECK(ring[slot].values() == of_rank(type, (r + size - 1) % size, 17).values());
                if (r > 0) CHECK(line[slot].values() == of_rank(type, r - 1, 17).values());
                Values want;
                for (int from = 0; from < size; ++from) {
                    int64_t first = 100;
                    for (int to = 0; to < r; ++to) first += count(from, to);
                    for (int64_t i = 0; i < count(from, r); ++i) want.push_back(element(from, first + i));
                }
                CHECK(mixed[slot].values() == want);
            }
        }
}

TEST_CASE("ranks may be processes", "[nccl]") {
    int pipe_fds[2];
    REQUIRE(::pipe(pipe_fds) == 0);
    const auto sum_of_ranks = [](int rank, const NcclIds& ids) {
        NcclCollectives group(fake_nccl::api(), {.name = "dp", .rank = rank, .size = 2, .key = "id"}, ids, {10, 10});
        Operand x = Operand::filled(DType::f32, 100000, rank + 1);
        group.all_reduce(nullptr, x.tensor());
        return x[99999];
    };
    const pid_t child = ::fork();
    if (child == 0) {
        const NcclIds ids{.put = {}, .take = [&](const std::string&, double, int) {
                              std::string id(NCCL_UNIQUE_ID_BYTES, '\0');
                              return ::read(pipe_fds[0], id.data(), id.size()) == NCCL_UNIQUE_ID_BYTES ? id : "";
                          }};
        ::_exit(sum_of_ranks(1, ids) == 3.0 ? 0 : 1);
    }
    const NcclIds ids{.put = [&](const std::string&, const std::string& id) { (void)!::write(pipe_fds[1], id.data(), id.size()); }, .take = {}};
    CHECK(sum_of_ranks(0, ids) == 3.0);
    int status = 1;
    CHECK((::waitpid(child, &status, 0) == child && status == 0));
    CHECK(fake_nccl::take_findings().empty());
    ::close(pipe_fds[0]);
    ::close(pipe_fds[1]);
}

TEST_CASE("ranks that do not make the same calls: both say so, and their group is of no further use", "[nccl]") {
    Operand a = Operand::filled(DType::f32, 8, 1), b = a;
    std::string later;
    Exit code = Exit::ok;
    Outcome outcome = on_group(2, [&](NcclCollectives& group, int rank) {
        Tensor x = (rank == 0 ? a : b).tensor();
        try {
            rank == 0 ? group.all_reduce(nullptr, x) : group.all_gather(nullptr, x.slice(4, 4), x);
        } catch (const Problem& p) {
            if (rank == 0) {
                code = p.code();
                try {
                    group.broadcast(nullptr, x, 0);
                } catch (const Problem& again) {
                    later = again.what();
                }
            }
            throw;
        }
    });
    const std::string why = "rank 0 of 'dp' issued all_reduce(sum) of 8 fp32, but rank 1 issued all_gather of 4 fp32";
    CHECK(code == Exit::fault);
    CHECK(outcome.found(why));
    CHECK(outcome.sentences[0].find("all_reduce on group 'dp' (rank 0 of 2): NCCL reports 'remote error' (" + why) == 0);
    CHECK(outcome.sentences[1].find("all_gather on group 'dp' (rank 1 of 2): NCCL reports 'remote error' (" + why) == 0);
    CHECK(later.find("broadcast on group 'dp' (rank 0 of 2): NCCL reports 'remote error' (" + why) == 0);
    CHECK(fake_nccl::communicators().open == 0);
}

TEST_CASE("what goes wrong while nobody is in a call is there for whoever waits for the stream", "[nccl]") {
    std::string before, during, after;
    std::promise<void> looked;
    const std::shared_future<void> has_looked = looked.get_future().share();
    const Outcome outcome = on_group(3, [&](NcclCollectives& group, int rank) {
        if (rank < 2) {
            has_looked.wait_for(std::chrono::seconds(10));
            Operand x = Operand::filled(DType::f32, 4 + rank, 1);
            return group.all_reduce(nullptr, x.tensor());  // the two do not agree
        }
        before = group.trouble();
        looked.set_value();
        for (int i = 0; i < 10000 && during.empty(); ++i) {
            during = group.trouble();
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        group.abort();
        after = group.trouble();
    });
    const std::string why = "rank 0 of 'dp' issued all_reduce(sum) of 4 fp32, but rank 1 issued all_reduce(sum) of 5 fp32";
    CHECK(before == "");
    CHECK(during.find("group 'dp' (rank 2 of 3): NCCL reports 'remote error' (" + why) == 0);
    CHECK(after == "the group was aborted, here or by another rank's failure");
    CHECK((outcome.sentences[2].empty() && outcome.found(why)));
}

TEST_CASE("a rank that does not come, an abort from another thread, and leaving because of an exception", "[nccl]") {
    Operand x = Operand::filled(DType::f32, 8, 1);
    // Rank 1 never makes the communicator; rank 0 never passes on its id.
    Ids alone;
    const auto lonely = on_threads(1, [&](int) { NcclCollectives(fake_nccl::api(), {.name = "tp", .rank = 0, .size = 2, .key = "k"}, alone.ids(), {0.05, 10}); });
    CHECK(lonely[0].find("start on group 'tp' (rank 0 of 2): not all ranks of the group came within 0.05 s") == 0);
    const auto no_id = on_threads(1, [&](int) { NcclCollectives(fake_nccl::api(), {.name = "tp", .rank = 1, .size = 2, .key = "other"}, alone.ids(), {0.05, 10}); });
    CHECK(no_id[0] == "nobody put other");

    // Rank 0 gives up after the deadline; in the second round a watchdog aborts its group before. Rank 1 waits for that, and then does
    // not wait for rank 0 to finalize: an exception is on its way, or rank 0 is known to have left.
    for (const bool watched : {false, true}) {
        std::mutex mutex;
        std::condition_variable changed;
        bool given_up = false;
        const Outcome outcome = on_group(
            2,
            [&](NcclCollectives& group, int rank) {
                if (rank == 1) {
                    std::unique_lock lock(mutex);
                    changed.wait_for(lock, std::chrono::seconds(10), [&] { return given_up; });
                    if (!watched) throw Problem(Exit::data, "rank 1 has no data");
                    return;
                }
                std::thread watchdog([&] {
                    if (!watched) return;
                    std::this_thread::sleep_for(std::chrono::milliseconds(20));
                    group.abort();
                });
                const auto leave = [&] {
                    watchdog.join();
                    const std::lock_guard lock(mutex);
                    given_up = true;
                    changed.notify_all();
                };
                try {
                    group.all_reduce(nullptr, x.tensor());
                } catch (...) {
                    leave();
                    throw;
                }
                leave();
            },
            {10, watched ? 10 : 0.05});
        CAPTURE(watched);
        CHECK(outcome.sentences[0] == std::string("all_reduce on group 'dp' (rank 0 of 2): ") +
                                          (watched ? "the group was aborted, here or by another rank's failure"
                                                   : "NCCL did not get it onto the stream within 0.05 s; the logs of the other ranks tell which of them is missing, and why"));
        CHECK(outcome.sentences[1] == (watched ? "" : "rank 1 has no data"));
        if (!watched) CHECK(outcome.findings.empty());
        if (watched) CHECK((outcome.findings.size() == 1 && outcome.found("nobody of 'dp' can go on: waiting are rank 1 in finalize; and rank 0 was aborted")));
        CHECK(fake_nccl::communicators().open == 0);
    }

    const Outcome outcome = on_group(1, [&](NcclCollectives& group, int) {
        group.abort();
        group.abort();
        group.all_reduce(nullptr, x.tensor());
    });
    CHECK(outcome.sentences[0] == "all_reduce on group 'dp' (rank 0 of 1): the group was aborted, here or by another rank's failure");
    CHECK(outcome.findings.empty());
}

TEST_CASE("many groups in one order, made and left again and again", "[nccl]") {
    const Outcome outcome = [&] {
        Ids ids;
        Outcome o;
        o.sentences = on_threads(4, [&](int rank) {
            for (int generation = 0; generation < 3; ++generation) {
                const std::string g = std::to_string(generation), row = std::to_string(rank / 2), column = std::to_string(rank % 2);
                NcclCollectives tp(fake_nccl::api(), {.name = "tp", .rank = rank % 2, .size = 2, .key = "tp/" + row + "/" + g}, ids.ids(), {10, 10});
                NcclCollectives dp(fake_nccl::api(), {.name = "dp", .rank = rank / 2, .size = 2, .key = "dp/" + column + "/" + g}, ids.ids(), {10, 10});
                Operand x = Operand::filled(DType::f32, 5, 1 << rank);
                for (int i = 0; i < 3; ++i) {
                    tp.all_reduce(nullptr, x.tensor());
                    dp.all_reduce(nullptr, x.tensor());
                }
                if (x[4] != 15.0 * 16) throw std::runtime_error("wrong sum");  // 4 equal ones twice more
            }
        });
        o.findings = fake_nccl::take_findings();
        return o;
    }();
    CHECK(outcome.all() == "");
    CHECK(fake_nccl::communicators().open == 0);
}
