// What begins and ends the noting of calls, and makes them again.
#include "capture.h"

#include <memory>

#include "cache.h"

using quire::Capture;

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

// Makes the calls again, in their order.
QUIRE_EXPORT void quire_replay(const Capture* capture) {
  for (const auto& call : capture->calls) call();
}

QUIRE_EXPORT void quire_free_capture(Capture* capture) { delete capture; }
