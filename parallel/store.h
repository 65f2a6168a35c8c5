// parallel/store.h   The control plane's sockets: the store on rank 0's node, and every rank's connection to it.
//
//   server   one thread, asleep unless something arrives; what messages mean is board.h's business
//   client   one connection per rank, rank 0 included (a socket pair). Any thread may ask; one more thread reads answers and news.
// Counted are messages of both directions, pings included.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "parallel/board.h"
#include "parallel/host_port.h"
#include "parallel/message.h"

namespace trifold {

constexpr size_t most_bytes_of_message = size_t{1} << 36, most_bytes_of_strangers = 64 << 10;

class StoreServer {
public:
    struct Options {
        int size = 0;
        double start_s = 60;     // deadline of the rendezvous
        uint64_t job_key = 0;   // who does not know it is turned away
        uint64_t data_key = 0;  // given to all ranks
        std::string host_id;
    };
    // `own` is rank 0's end of the store, by a socket pair; the server ends when the other end of it is closed.
    StoreServer(Socket listener, Socket own, const Options& options);
    ~StoreServer();
    StoreServer(const StoreServer&) = delete;
    StoreServer& operator=(const StoreServer&) = delete;
    int64_t received() const { return received_; }

private:
    struct Connection;
    struct Loop;
    std::atomic<int64_t> received_ = 0;
    std::thread thread_;
};

// A connection to the store, before the rendezvous.
struct StoreLink {
    Socket socket;
    int64_t clock_offset_ns = 0;  // to add to this host's clock to get the store's
    int64_t sent = 0;
};
// Somebody else answers at the store's address, so rank 0 cannot be there.
struct StrangerProblem : Problem {
    using Problem::Problem;
};
// Tries the addresses in turn until one answers as the store of this job. Throws Problem(Exit::usage) or StrangerProblem.
StoreLink connect_to_store(const std::vector<HostPort>& addresses, uint64_t job_key, const std::string& host_id, double start_s);
// Rank 0's: the end for the server, and its own.
std::pair<Socket, StoreLink> link_inside_process();

class StoreClient {
public:
    // `on_failure` is called once, by the reading thread, when the job fails.
    StoreClient(StoreLink link, int rank, std::function<void()> on_failure);
    ~StoreClient();
    StoreClient(const StoreClient&) = delete;
    StoreClient& operator=(const StoreClient&) = delete;

    void tell(Verb verb, std::string body);
    // Waits for the answer. Throws Problem: what the store refuses with, the job's failure, or the deadline: Exit::fault, "... `late`".
    std::string ask(Verb verb, std::string body, SocketClock::time_point deadline, const std::string& late);
    // Whether this rank speaks for the job; the job has failed from here on.
    bool fail(Exit code, const std::string& sentence);
    // Nothing may be asked after this. Throws like ask().
    void goodbye(double seconds);

    std::optional<Failure> failure() const;
    int64_t sent() const { return sent_; }

private:
    std::optional<Message> await(Verb verb, std::string body, SocketClock::time_point deadline, bool survives_failure);
    void send(const Message& message, SocketClock::time_point deadline);
    void read();
    void arrived(const Message& message);
    void failed(Failure failure);

    const int rank_;
    const Socket socket_;
    const std::function<void()> on_failure_;
    std::atomic<int64_t> sent_ = 0;
    std::mutex sending_;
    mutable std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    uint64_t last_id_ = 0;
    std::map<uint64_t, std::optional<Message>> answers_;  // to the questions that wait
    std::optional<Failure> failure_;
    bool closed_ = false;   // the connection has ended
    bool leaving_ = false;  // goodbye has been said
    std::thread reader_;
};

}  // namespace trifold
