// parallel/schedule_traffic.h   What each stage of a pipeline sends and receives, and when its receives are posted (DESIGN 5).
//
// Four channels per stage: activations and gradients, sent and received, each with its own communicator and stream, because the
// order of a channel is all that tells its messages apart. After F of part k its activation goes to the stage of part k+1, after
// B of part k its gradient to the stage of part k-1; stages form a ring, so a channel has one peer, and the two ends of a link
// are the `sends` of one stage and the `receives` of the other. With 2 stages both neighbours are the same peer, but there are
// still four links: activations 0 -> 1 and (interleaved, round the ring) 1 -> 0, gradients 1 -> 0 and 0 -> 1.
//
//   order     a channel's order is that in which the sender's list produces; the receiver posts in this order, whatever it needs
//             first
//   posted    before an action starts, the receives it waits for and the next `lookahead` of each channel are posted
//   complete  a send is complete when its receive is posted and all earlier messages of the link are (rendezvous); nothing else is
//             assumed of the transport
//   buffers   a received message stays in its buffer from posting to the end of the action that takes it in; a message to send
//             stays in its buffer until the send is complete; send j uses buffer j % send_buffers
//
// A runner on one stage walks through `steps`, one per action: post receives up to `posted`, wait for `receive`, wait until the
// send that used the buffer before is complete, run the action, send `send`. With one stage there are no messages: chunk c+1
// takes what chunk c left.
#pragma once
#include <array>
#include <vector>

#include "parallel/schedule.h"

namespace trifold {

enum class Payload : uint8_t { activation, gradient };
// The payload that F, or B, takes in and leaves, as an index. W has no messages.
inline size_t channel_of(Act act) { return static_cast<size_t>(act == Act::F ? Payload::activation : Payload::gradient); }

// One message as one end sees it.
struct Transfer {
    int chunk = 0;  // of this stage: whose F or B produces what is sent, or takes in what is received
    int micro = 0;
    int action = 0;  // position of that F or B in this stage's program
    int buffer = 0;  // of this channel, 0 ... receive_buffers - 1 or send_buffers - 1
    int after = -1;  // receives: position of the action that took in the message before it in this buffer; -1: it is the first
};

// What surrounds one action. F receives and sends activations, B gradients, W nothing.
struct Step {
    Action action;
    std::array<int, 2> posted{};  // by Payload: this many receives are posted before the action starts
    int receive = -1;             // it waits for this element of `receives` of its payload; -1: none
    int send = -1;                // this element of `sends` of its payload follows it; -1: none
};

struct StageTraffic {
    std::vector<Step> steps;                               // one per action of the program
    std::array<std::vector<Transfer>, 2> receives, sends;  // by Payload, in the order of the channel
    std::array<int, 2> receive_buffers{}, send_buffers{};  // that the channel needs; receives never have more outstanding
};

struct TrafficOptions {
    int lookahead = 1;     // receives of a channel that are posted beyond those taken in, at least 1
    int send_buffers = 1;  // an action that sends runs when at most send_buffers - 1 earlier sends are incomplete; at least 1
};

// The traffic of all stages, for programs in which every action can start. Stage s of the result is all that a runner on stage s needs.
std::vector<StageTraffic> derive_traffic(const std::vector<Program>& programs, int virtual_stages,
                                         const TrafficOptions& options = {});

}  // namespace trifold
