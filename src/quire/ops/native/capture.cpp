// What begins and ends the noting of calls, and makes them again.
#include "capture.h"

#include <memory>

#include "cache.h"
#include "parallel.h"

using quire::Capture;

namespace {

void replay(const Capture& capture) {
  for (const auto& call : capture.calls) call();
}

}  // namespace

// Has this thread note its calls from now on, into a capture that is freed by `quire_free_capture`.
QUIRE_EXPORT Capture* quire_begin_capture() {
  auto capture = std::make_unique<Capture>();
  quire::capturing = capture.get();
  return capture.release();
}

// Ends that. Returns how many calls were noted, or -1 where one was made that cannot be made again.
QUIRE_EXPORT int64_t quire_end_capture(Capture* capture) {
  quire::capturing = nullptr;
  return capture->is_whole ? int64_t(capture->calls.size()) : -1;
}

// Makes the calls again, in their order: by the first thread that comes, while the others help with each.
QUIRE_EXPORT void quire_replay(const Capture* capture) {
  const int64_t num_threads = quire::max_threads();
  if (num_threads <= 1) return replay(*capture);
  quire::Team team(num_threads);
  std::atomic<bool> is_led{false};
  quire::in_parallel(num_threads, 1, [&](int64_t, int64_t) {
    if (is_led.exchange(true)) return team.help();
    quire::team = &team;
    replay(*capture);
    quire::team = nullptr;
    team.end();
  });
}

QUIRE_EXPORT void quire_free_capture(Capture* capture) { delete capture; }
