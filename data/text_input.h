// data/text_input.h   The text that `trifold data tokenize` reads, in chunks that can be encoded apart from each other.
//
// A text file is one document, a line of a JSONL file is one. Chunks depend on the input and the tokenizer alone, never
// on the number of threads. Files whose names end in .gz or .dz are unpacked on the way.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/tokenizer.h"

namespace trifold {

enum class TextKind : uint8_t { by_name, text, jsonl };  // by_name: .jsonl and .ndjson (with .gz) are JSONL, others text

struct TextFile {
    std::string path;
    int64_t bytes = 0;  // on disk
    bool jsonl = false, packed = false;
};

// Files as given; folders recursively, sorted by path, without names that begin with a dot. Nothing found: a Problem.
std::vector<TextFile> find_text(const std::vector<std::string>& inputs, TextKind kind);

// Which output a chunk belongs to; by_number: each of its documents goes where its number says.
enum class Part : uint8_t { train, validation, by_number };

struct TextChunk {
    const TextFile* file = nullptr;
    std::string text{};
    int64_t offset = 0;          // of the text in its (unpacked) file, in bytes
    int64_t first_line = 1;      // JSONL
    int64_t first_document = 0;  // number of its first document, counted over all files
    Part part = Part::train;
    bool begins_document = true, ends_document = true;  // text
};

struct ChunkOptions {
    // Share of the text for validation, 0 <= share < 1. Documents go there evenly spread, by their number. A text file of at least
    // `large_file` bytes, or one that is alone, gives its end instead, so that both parts have something of it.
    double validation = 0;
    int64_t large_file = int64_t{1} << 20;
    int64_t chunk_bytes = int64_t{1} << 20;
};

// True for `share` of all document numbers, evenly spread.
bool is_validation_document(int64_t number, double share);

class ChunkReader {
public:
    ChunkReader(const std::vector<TextFile>& files, const Tokenizer& tokenizer, const ChunkOptions& options);
    ~ChunkReader();
    bool next(TextChunk& chunk);
    int64_t bytes_read() const;  // of the files on disk

private:
    class Source;
    void open_next_file();
    size_t read_to_cut(int64_t document_end);
    bool next_text(TextChunk& chunk);
    bool next_lines(TextChunk& chunk);

    const std::vector<TextFile>& files_;
    const Tokenizer& tokenizer_;
    ChunkOptions options_;
    std::unique_ptr<Source> source_;  // the file being read
    size_t next_file_ = 0;
    int64_t document_ = 0;
    int64_t finished_bytes_ = 0;
};

}  // namespace trifold
