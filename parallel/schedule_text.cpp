// parallel/schedule_text.cpp   Schedules as people read and write them: "stage 0: F0 F1 B0 B1", "F0.1" for chunk 1.
#include <fmt/format.h>

#include <charconv>
#include <sstream>

#include "base/error.h"
#include "parallel/schedule.h"

namespace trifold {
namespace {

// Reads a number from `text` and removes it; -1 where there is none.
int take_number(std::string_view& text) {
    int number = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || number < 0) return -1;
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    return number;
}

bool parse_action(std::string_view word, Action& action) {
    switch (word.empty() ? ' ' : word[0]) {
        case 'F':
            action.act = Act::F;
            break;
        case 'B':
            action.act = Act::B;
            break;
        case 'W':
            action.act = Act::W;
            break;
        default:
            return false;
    }
    word.remove_prefix(1);
    action.micro = take_number(word);
    action.chunk = 0;
    if (!word.empty() && word[0] == '.') {
        word.remove_prefix(1);
        action.chunk = take_number(word);
    }
    return action.micro >= 0 && action.chunk >= 0 && word.empty();
}

}  // namespace

char letter_of(Act act) { return act == Act::F ? 'F' : act == Act::B ? 'B' : 'W'; }

std::string text_of(const Action& action, int virtual_stages) {
    std::string text = letter_of(action.act) + std::to_string(action.micro);
    if (virtual_stages > 1) text += "." + std::to_string(action.chunk);
    return text;
}

std::vector<std::string> text_of(const std::vector<Program>& programs, int virtual_stages) {
    std::vector<std::string> lines;
    for (size_t stage = 0; stage < programs.size(); ++stage) {
        std::string line = fmt::format("stage {}:", stage);
        for (const Action& action : programs[stage]) line += " " + text_of(action, virtual_stages);
        lines.push_back(std::move(line));
    }
    return lines;
}

std::vector<Program> parse_schedule(const std::string& text) {
    std::vector<Program> programs;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        std::string word, number;
        if (!(words >> word)) continue;  // an empty line
        words >> number;
        if (word != "stage" || number != std::to_string(programs.size()) + ":")
            throw Problem(Exit::usage, fmt::format("schedule: a line begins with '{} {}' where 'stage {}:' is expected", word,
                                                   number, programs.size()));
        Program& program = programs.emplace_back();
        while (words >> word)
            if (!parse_action(word, program.emplace_back()))
                throw Problem(
                    Exit::usage,
                    fmt::format("schedule: '{}' of stage {} is not an action: F3, B3 or W3 of micro-batch 3, F3.1 in chunk 1",
                                word, programs.size() - 1));
    }
    return programs;
}

}  // namespace trifold
