// kernels/cpu/attention_decode.h   Attention of a few new queries over a long KV cache.
#pragma once
#include "kernels/ops.h"

namespace trifold::cpu::attention {

// Calls with at most this many queries per sequence are limited by reading the cache, not by arithmetic.
inline constexpr int64_t decode_queries = 4;

template <class T>
void decode(const AttentionForward& args);

// Bytes for up to decode_queries queries and any number of keys.
int64_t decode_workspace(const AttentionForward& args);

}  // namespace trifold::cpu::attention
