// parallel/console.cpp   Columns, the bar, and the time left.
#include "parallel/console.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/text.h"

namespace trifold {
namespace {

constexpr auto between_drawings = std::chrono::milliseconds(100);  // a small model makes hundreds of steps a second
constexpr const char* erase_line = "\r\x1b[2K";

// Columns of a terminal; 0: it is none.
int terminal_width(std::FILE* out) {
    winsize size{};
    const int fd = ::fileno(out);
    return fd >= 0 && ::isatty(fd) == 1 && ::ioctl(fd, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

// mpirun gives its ranks a terminal without a size, whatever its own output is.
bool wants_bar(const TelemetryOptions& o) {
    if (o.console != ConsoleStyle::automatic) return o.console == ConsoleStyle::bar;
    return terminal_width(o.out) > 0;
}

// The sign of a NaN says nothing.
double unsigned_nan(double x) { return std::isnan(x) ? std::abs(x) : x; }

std::string percent(double share) { return std::isfinite(share) ? fmt::format("{:.1f}%", 100 * share) : "-"; }

}  // namespace

std::string human_seconds(double s) {
    if (!std::isfinite(s)) return "-";
    if (s < 59.5) return s < 10 ? fmt::format("{:.3g} s", s) : fmt::format("{:.0f} s", s);
    const auto t = static_cast<int64_t>(std::lround(s));
    if (t < 3600) return fmt::format("{}m{:02}s", t / 60, t % 60);
    if (t < 86400) return fmt::format("{}h{:02}m", t / 3600, t % 3600 / 60);
    return fmt::format("{}d{:02}h", t / 86400, t % 86400 / 3600);
}

Console::Console(const TelemetryOptions& options) : options_(options), bar_(wants_bar(options)) {}

Console::~Console() {
    if (bar_) write(erase_line);
}

void Console::step(const StepRecord& r) {
    const bool first = records_++ == 0;
    const bool settled = records_ > 2;  // the first step also warms up
    typical_step_s_ = settled ? 0.9 * typical_step_s_ + 0.1 * r.step_s : r.step_s;
    step_ = r.step;
    const bool due = first || r.step == options_.steps || r.step % std::max<int64_t>(options_.log_every, 1) == 0;
    if (!due) {
        if (bar_ && std::chrono::steady_clock::now() - drawn_ >= between_drawings) draw_bar();
        return;
    }
    if (!header_written_) {
        header_written_ = true;
        const std::string mfu =
            options_.mfu_convention.empty() ? "" : fmt::format("   MFU: {}", options_.mfu_convention);
        line(fmt::format("{:>{}} {:>9} {:>9} {:>9} {:>9} {:>7} {:>10} {:>9} {:>7}{}", "step", position(0).size(),
                         "loss", "grad norm", "lr", "tokens/s", "MFU", "memory", "step time", "left", mfu));
    }
    line(fmt::format("{} {:>9.4f} {:>9.4f} {:>9.2e} {:>9} {:>7} {:>10} {:>9} {:>7}", position(r.step), unsigned_nan(r.loss),
                     unsigned_nan(r.grad_norm), r.lr, with_prefix(r.tokens_per_s), percent(r.mfu), human_bytes(r.mem_bytes),
                     human_seconds(r.step_s), time_left()));
}

void Console::evaluation(int64_t step, double val_loss) {
    line(fmt::format("{} validation loss {:.4f}", position(step), val_loss));
}

void Console::line(const std::string& text) {
    if (!bar_) return write(text + "\n");
    write(erase_line + text + "\n");
    draw_bar();
}

std::string Console::position(int64_t step) const {
    const std::string steps = std::to_string(options_.steps);
    return fmt::format("{:>{}}/{}", step, steps.size(), steps);
}

std::string Console::time_left() const {
    return human_seconds(typical_step_s_ * static_cast<double>(std::max<int64_t>(options_.steps - step_, 0)));
}

// [#########...........]  45%  450/1000  2m10s left
void Console::draw_bar() {
    drawn_ = std::chrono::steady_clock::now();
    const double done = options_.steps > 0 ? static_cast<double>(step_) / static_cast<double>(options_.steps) : 0;
    const std::string text = fmt::format(" {:3.0f}%  {}  {} left", 100 * done, position(step_), time_left());
    const int width = terminal_width(options_.out);
    const int room = std::min((width > 0 ? width : 80) - 1, 100) - static_cast<int>(text.size()) - 2;
    if (room < 5) return write(erase_line + text);
    const int filled = static_cast<int>(std::clamp(done, 0.0, 1.0) * room);
    write(fmt::format("{}[{:#<{}}{:.<{}}]{}", erase_line, "", filled, "", room - filled, text));
}

void Console::write(const std::string& text) {
    const bool ok =
        std::fwrite(text.data(), 1, text.size(), options_.out) == text.size() && std::fflush(options_.out) == 0;
    if (ok) return;
    const int error = errno;
    std::clearerr(options_.out);
    if (!std::exchange(complained_, true))
        std::fprintf(options_.complaints, "cannot write to standard output: %s; the run goes on\n", std::strerror(error));
}

}  // namespace trifold
