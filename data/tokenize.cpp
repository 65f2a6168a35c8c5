// data/tokenize.cpp
#include "data/tokenize.h"

#include <algorithm>
#include <array>
#include <deque>
#include <future>
#include <limits>
#include <memory>
#include <thread>

#include "base/cpus.h"
#include "base/queue.h"
#include "base/refuse.h"
#include "base/text.h"
#include "data/json_document.h"
#include "data/token_writer.h"
#include "data/utf8.h"

namespace trifold {
namespace {

// The documents of one chunk that go to one output.
struct Encoded {
    std::vector<int32_t> ids;
    std::vector<uint8_t> prompt;         // one per id, or empty: none of them is prompt
    std::vector<int64_t> document_ends;  // positions in ids
};
struct EncodedChunk {
    std::array<Encoded, 2> part;  // train, validation
    int64_t empty_documents = 0;
};

// Encodes chunks, one after another. One per thread.
class ChunkEncoder {
public:
    ChunkEncoder(const Tokenizer& tokenizer, const TokenizeOptions& options, double validation)
        : tokenizer_(tokenizer), encoder_(tokenizer), options_(options), validation_(validation), end_(tokenizer.end_of_document()) {}

    EncodedChunk encode(const TextChunk& chunk) {
        EncodedChunk out;
        chunk.file->jsonl ? encode_lines(chunk, out) : encode_text(chunk, out);
        return out;
    }

private:
    Encoded& part_of(Part part, int64_t document, EncodedChunk& out) const {
        const bool validation = part == Part::validation || (part == Part::by_number && is_validation_document(document, validation_));
        return out.part[validation ? 1 : 0];
    }

    static void check_utf8(const TextChunk& chunk, const char* advice) {
        const size_t bad = invalid_utf8(chunk.text);
        if (bad != std::string::npos)
            refuse(Exit::data, "{} is not UTF-8 at byte offset {} (0x{:02x}); {}", chunk.file->path, chunk.offset + static_cast<int64_t>(bad),
                   static_cast<uint8_t>(chunk.text[bad]), advice);
    }

    void encode_text(const TextChunk& chunk, EncodedChunk& out) {
        if (chunk.begins_document && chunk.ends_document && chunk.text.empty()) {
            ++out.empty_documents;
            return;
        }
        Encoded& part = part_of(chunk.part, chunk.first_document, out);
        if (chunk.begins_document) part.ids = tokenizer_.document_prefix();
        if (!tokenizer_.is_bytes()) check_utf8(chunk, "convert the file, or take the byte tokenizer, which takes any input");
        encoder_.encode(chunk.text, part.ids, options_.special);
        if (chunk.ends_document) {
            part.ids.push_back(end_);
            part.document_ends.push_back(std::ssize(part.ids));
        }
    }

    void encode_lines(const TextChunk& chunk, EncodedChunk& out) {
        check_utf8(chunk, "JSON must be UTF-8");
        int64_t number = 0;
        for (size_t begin = 0; begin < chunk.text.size(); ++number) {
            const size_t end = std::min(chunk.text.find('\n', begin), chunk.text.size());
            const std::string_view line = std::string_view(chunk.text).substr(begin, end - begin);
            begin = end + 1;
            if (leading_space(line) == line.size()) continue;  // a blank line
            try {
                encode_document(line, part_of(chunk.part, chunk.first_document + number, out), out);
            } catch (const Problem& problem) {
                refuse(problem.code(), "{} line {}: {}", chunk.file->path, chunk.first_line + number, problem.what());
            }
        }
    }

    void encode_document(std::string_view line, Encoded& part, EncodedChunk& out) {
        const std::vector<Segment> segments = parse_json_document(line, tokenizer_, options_.text_key, options_.special);
        if (segments.empty()) {
            ++out.empty_documents;
            return;
        }
        const bool has_prompt = std::any_of(segments.begin(), segments.end(), [](const Segment& s) { return s.prompt; });
        if (has_prompt) part.prompt.resize(part.ids.size(), 0);
        const auto close = [&](bool prompt) {
            if (!part.prompt.empty() || has_prompt) part.prompt.resize(part.ids.size(), prompt ? 1 : 0);
        };
        part.ids.insert(part.ids.end(), tokenizer_.document_prefix().begin(), tokenizer_.document_prefix().end());
        close(has_prompt);
        for (const Segment& segment : segments) {
            encoder_.encode(segment.text, part.ids, segment.special);
            close(segment.prompt);
        }
        part.ids.push_back(end_);
        close(false);
        part.document_ends.push_back(std::ssize(part.ids));
    }

    const Tokenizer& tokenizer_;
    Encoder encoder_;
    const TokenizeOptions& options_;
    double validation_;
    int32_t end_;
};

// Threads that encode chunks in any order; each result is waited for through its future.
class Workers {
public:
    Workers(int threads, const std::function<std::shared_ptr<ChunkEncoder>()>& make_encoder) {
        for (int t = 0; t < threads; ++t)
            threads_.emplace_back([this, encoder = make_encoder()] {
                while (std::optional<Task> task = tasks_.pop()) (*task)(*encoder);
            });
    }
    ~Workers() { tasks_.close(); }
    std::future<EncodedChunk> submit(TextChunk chunk) {
        Task task([chunk = std::move(chunk)](ChunkEncoder& encoder) { return encoder.encode(chunk); });
        std::future<EncodedChunk> result = task.get_future();
        tasks_.push(std::move(task));
        return result;
    }

private:
    using Task = std::packaged_task<EncodedChunk(ChunkEncoder&)>;
    Queue<Task> tasks_{std::numeric_limits<size_t>::max()};  // whoever submits limits what is under way
    std::vector<std::jthread> threads_;
};

void write(const Encoded& encoded, TokenWriter& writer) {
    const std::span<const int32_t> ids(encoded.ids);
    const std::span<const uint8_t> prompt(encoded.prompt);
    size_t begin = 0;
    const auto append = [&](size_t end) {
        writer.append(ids.subspan(begin, end - begin), prompt.empty() ? prompt : prompt.subspan(begin, end - begin));
        begin = end;
    };
    for (const int64_t end : encoded.document_ends) {
        append(static_cast<size_t>(end));
        writer.end_document();
    }
    append(ids.size());
}

// The prefix of each output: one, or a training and a validation part.
std::vector<std::string> prefixes_of(const TokenizeOptions& options) {
    if (options.validation > 0) return {options.prefix + "_train", options.prefix + "_val"};
    return {options.prefix};
}

double validation_share(const TokenizeOptions& options, int64_t total_bytes) {
    const double wanted = options.validation;
    const double share = wanted < 1 ? wanted : wanted / static_cast<double>(std::max<int64_t>(total_bytes, 1));
    if (!(share >= 0)) refuse(Exit::usage, "--val {} is neither a share of the text nor a number of bytes", wanted);
    if (share >= 1)
        refuse(Exit::usage, "--val {} of {} bytes of text leaves nothing to train on: give a share below 1, or fewer bytes", wanted,
               with_commas(total_bytes));
    return share;
}

void check_parts(const TokenizeOptions& options, const std::vector<std::unique_ptr<TokenWriter>>& writers) {
    if (writers[0]->written().tokens == 0) refuse(Exit::data, "there is no text in {}", join_words(options.inputs));
    if (writers.back()->written().tokens == 0)
        refuse(Exit::data, "--val {} gives no document to the validation part: {} documents are too few; give a larger share", options.validation,
               writers[0]->written().documents);
}

}  // namespace

TokenizeResult tokenize(const TokenizeOptions& options, const std::function<void(const TokenizeProgress&)>& progress) {
    const Tokenizer tokenizer = Tokenizer::load(options.tokenizer, options.end_of_document);
    const std::vector<TextFile> files = find_text(options.inputs, options.kind);
    TokenizeProgress state;
    for (const TextFile& file : files) state.bytes_total += file.bytes;
    const double validation = validation_share(options, state.bytes_total);
    const TokenType type = token_type_for(options.format, tokenizer.vocab_size());
    const bool any_jsonl = std::any_of(files.begin(), files.end(), [](const TextFile& file) { return file.jsonl; });
    std::vector<std::unique_ptr<TokenWriter>> writers;
    for (const std::string& prefix : prefixes_of(options))
        writers.push_back(std::make_unique<TokenWriter>(WriterOptions{prefix, options.format, type, options.shard_tokens, any_jsonl}));

    TokenizeResult result;
    const int threads = options.threads > 0 ? options.threads : usable_cpus();
    Workers workers(threads, [&] { return std::make_shared<ChunkEncoder>(tokenizer, options, validation); });
    ChunkReader reader(files, tokenizer, {.validation = validation, .chunk_bytes = options.chunk_bytes});
    std::deque<std::future<EncodedChunk>> under_way;
    const auto write_first = [&] {
        const EncodedChunk encoded = under_way.front().get();
        under_way.pop_front();
        for (size_t p = 0; p < writers.size(); ++p) write(encoded.part[p], *writers[p]);
        result.empty_documents += encoded.empty_documents;
        state.tokens = 0;
        for (const auto& writer : writers) state.tokens += writer->written().tokens;
        state.bytes_read = reader.bytes_read();
        if (progress) progress(state);
    };
    for (TextChunk chunk; reader.next(chunk);) {
        if (std::ssize(under_way) == 4 * threads) write_first();
        under_way.push_back(workers.submit(std::move(chunk)));
    }
    while (!under_way.empty()) write_first();

    check_parts(options, writers);
    for (const auto& writer : writers) writer->finish();
    for (size_t p = 0; p < writers.size(); ++p) result.outputs.push_back({writers[p]->commit(), writers.size() == 1 ? "all" : p == 0 ? "train" : "val"});
    result.input_files = std::ssize(files);
    result.input_bytes = state.bytes_total;
    result.vocab = tokenizer.vocab_size();
    result.dtype = name_of(type);
    return result;
}

}  // namespace trifold
