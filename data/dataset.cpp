// data/dataset.cpp
#include "data/dataset.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

#include "base/refuse.h"

namespace trifold {
namespace {

constexpr int64_t block_tokens = int64_t{1} << 18;

std::optional<MaskFile> open_mask(const TokenFile& file) {
    const std::string path = mask_path(file.path());
    if (!std::filesystem::exists(path)) return std::nullopt;
    return MaskFile(path, file.tokens());
}

// Calls block(ids, first) for consecutive pieces of tokens [begin, end) of the file.
template <class Block>
void for_each_block(const TokenFile& file, int64_t begin, int64_t end, Block block) {
    std::vector<int32_t> ids;
    for (int64_t first = begin; first < end; first += block_tokens) {
        ids.resize(static_cast<size_t>(std::min(block_tokens, end - first)));
        file.read(first, ids);
        block(std::span<const int32_t>(ids), first);
    }
}

// Counts stretches of tokens between ends of documents.
struct DocumentCounter {
    int32_t end;
    int64_t count = 0;
    bool inside = false;
    void add(std::span<const int32_t> ids) {
        for (const int32_t id : ids) {
            count += id != end && !inside;
            inside = id != end;
        }
    }
};

// The id that ends every document of a Megatron file.
std::optional<int32_t> common_end(const std::vector<TokenFile>& files) {
    std::optional<int64_t> common;
    for (const TokenFile& file : files)
        for (int64_t end = 0; end < file.tokens();) {
            end = file.next_listed_document(end);
            const int64_t last = file.at(end - 1);
            if (common.value_or(last) != last) return std::nullopt;
            common = last;
        }
    if (!common || *common < 0 || *common > std::numeric_limits<int32_t>::max()) return std::nullopt;
    return static_cast<int32_t>(*common);
}

DatasetSummary summarize(const std::vector<TokenFile>& files, std::optional<int32_t> end, const DatasetProgress& progress) {
    DatasetSummary summary{
        .format = files[0].format(), .type = files[0].type(), .files = std::ssize(files), .end_of_document = end, .prompt_tokens = 0};
    int64_t total = 0, listed = 0;
    for (const TokenFile& file : files) {
        if (file.format() != summary.format || file.type() != summary.type)
            refuse(Exit::data, "{} and {} differ in format or type of tokens; look at them one at a time", files[0].path(), file.path());
        total += file.tokens();
        listed += file.listed_documents().value_or(0);
    }
    std::vector<DocumentCounter> counters = {{256}, {50256}, {128000}};  // what usually ends documents
    if (end) counters = {{*end}};
    summary.vocab_min = total > 0 ? std::numeric_limits<int64_t>::max() : 0;
    for (const TokenFile& file : files) {
        for_each_block(file, 0, file.tokens(), [&](std::span<const int32_t> ids, int64_t first) {
            const auto [least, most] = std::minmax_element(ids.begin(), ids.end());
            const auto stored = [&](auto at) { return file.at(first + (at - ids.begin())); };
            summary.vocab_min = std::min(summary.vocab_min, stored(least));
            summary.vocab_max = std::max(summary.vocab_max, stored(most));
            for (DocumentCounter& counter : counters) counter.add(ids);
            if (progress) progress(summary.tokens + first + std::ssize(ids), total);
        });
        const auto mask = open_mask(file);
        if (!mask) summary.prompt_tokens.reset();
        if (mask && summary.prompt_tokens) *summary.prompt_tokens += mask->count(0, file.tokens());
        summary.tokens += file.tokens();
        summary.bytes += file.byte_offset(file.tokens());
    }
    if (summary.format == TokenFormat::megatron) {
        summary.documents = listed;
        if (!end) summary.end_of_document = common_end(files);
    } else {
        const size_t guess = end || summary.vocab_max <= 256 ? 0 : summary.type == TokenType::u32 ? 2 : 1;
        summary.end_of_document = counters[guess].end;
        summary.documents = counters[guess].count;
    }
    return summary;
}

// Copies one file after another. Where no index lists documents, one ends with the end's id and may go on in the next file; ends in front of
// the first text, or several in a row, do not make documents of their own.
class Copier {
public:
    Copier(TokenWriter& writer, std::optional<int32_t> end, std::function<void(int64_t)> count)
        : writer_(writer), end_(end), count_(std::move(count)) {}

    void copy(const TokenFile& file, const MaskFile* mask) {
        const bool listed = file.listed_documents().has_value();
        int64_t next = listed ? file.next_listed_document(0) : -1;  // where the next listed document begins
        for_each_block(file, 0, file.tokens(), [&](std::span<const int32_t> ids, int64_t first) {
            int64_t begin = 0;
            const auto append_to = [&](int64_t end) {
                append(ids.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)), mask, first + begin);
                begin = end;
            };
            for (int64_t i = 0; i < std::ssize(ids); ++i) {
                const bool is_end = ids[static_cast<size_t>(i)] == end_, ends = listed ? first + i + 1 == next : is_end && has_text_;
                has_text_ = !is_end;
                if (!ends) continue;
                append_to(i + 1);
                if (listed) next = file.next_listed_document(next);
                if (listed && end_ && !is_end) {
                    writer_.append({&*end_, 1});
                    ++appended_;
                }
                writer_.end_document();
            }
            append_to(std::ssize(ids));
        });
    }
    int64_t appended_ends() const { return appended_; }

private:
    void append(std::span<const int32_t> ids, const MaskFile* mask, int64_t first) {
        prompt_.clear();
        for (int64_t i = 0; mask != nullptr && i < std::ssize(ids); ++i) prompt_.push_back(mask->is_prompt(first + i));
        writer_.append(ids, prompt_);
        count_(writer_.written().tokens);
    }

    TokenWriter& writer_;
    std::optional<int32_t> end_;
    std::function<void(int64_t)> count_;
    std::vector<uint8_t> prompt_;
    bool has_text_ = false;  // the open document has more than ends
    int64_t appended_ = 0;
};

// How often each id occurs; index = id.
std::vector<int64_t> count_tokens(const std::string& path_or_glob) {
    std::vector<int64_t> counts;
    for (const TokenFile& file : open_token_files(path_or_glob))
        for_each_block(file, 0, file.tokens(), [&](std::span<const int32_t> ids, int64_t) {
            for (const int32_t id : ids) {
                if (id < 0) refuse(Exit::data, "{} has the negative id {}", file.path(), id);
                if (id >= std::ssize(counts)) counts.resize(static_cast<size_t>(id) + 1);
                ++counts[static_cast<size_t>(id)];
            }
        });
    return counts;
}

}  // namespace

DatasetSummary inspect(const std::string& path, std::optional<int32_t> end_of_document, const DatasetProgress& progress) {
    return summarize(open_token_files(path), end_of_document, progress);
}

ConvertResult convert(const ConvertOptions& options, const DatasetProgress& progress) {
    const std::vector<TokenFile> files = open_token_files(options.input);
    std::error_code ignored;
    for (const TokenFile& file : files)  // a conversion onto itself would end with the input gone
        if (std::filesystem::equivalent(file.path(), options.prefix + ".bin", ignored))
            refuse(Exit::usage, "--out {} would replace the input {}: choose another name", options.prefix, file.path());
    const DatasetSummary input = summarize(files, options.end_of_document, {});
    if (input.vocab_min < 0 || input.vocab_max > std::numeric_limits<int32_t>::max())
        refuse(Exit::data, "{} has ids from {} to {}; they cannot be tokens", options.input, input.vocab_min, input.vocab_max);
    if (options.format == TokenFormat::llmc && !input.end_of_document && input.documents > 1)
        refuse(Exit::data,
               "the documents of {} do not end with one common id, so an llm.c file could not tell where they end: "
               "name the id to be put behind them with --eod",
               options.input);
    std::vector<std::optional<MaskFile>> masks;
    for (const TokenFile& file : files) masks.push_back(open_mask(file));
    const bool any_mask = std::any_of(masks.begin(), masks.end(), [](const auto& mask) { return mask.has_value(); });
    const int64_t largest = std::max<int64_t>(input.vocab_max, options.end_of_document.value_or(0));
    const TokenType type = token_type_for(options.format, std::max(options.vocab, largest + 1));
    TokenWriter writer({options.prefix, options.format, type, options.shard_tokens, any_mask});
    Copier copier(writer, input.end_of_document, [&](int64_t tokens) {
        if (progress) progress(tokens, input.tokens);
    });
    for (size_t f = 0; f < files.size(); ++f) copier.copy(files[f], masks[f] ? &*masks[f] : nullptr);
    writer.finish();
    return {writer.commit(), input, copier.appended_ends()};
}

UnigramLoss unigram_loss(const std::string& train, const std::string& val) {
    std::vector<int64_t> known = count_tokens(train), seen = count_tokens(val);
    known.resize(std::max(known.size(), seen.size()));
    seen.resize(known.size());
    double total = 0, nats = 0;
    for (const int64_t n : known) total += static_cast<double>(n + 1);
    UnigramLoss result;
    for (size_t id = 0; id < known.size(); ++id) {
        nats -= static_cast<double>(seen[id]) * std::log(static_cast<double>(known[id] + 1) / total);
        result.tokens += seen[id];
    }
    result.loss = result.tokens > 0 ? nats / static_cast<double>(result.tokens) : 0;
    return result;
}

}  // namespace trifold
