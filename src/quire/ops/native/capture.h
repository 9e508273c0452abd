// Calls of kernels, noted while they are made, to be made again as one call. A step of few rows makes hundreds of them;
// what their caller does between them, and the way to them, takes longer than some of them.
//
// Whatever they point to, rows and results, must be where it was when they are made again; what is in it may differ.
#pragma once

#include <functional>
#include <vector>

namespace quire {

struct Capture {
  std::vector<std::function<void()>> calls;
  bool is_whole = true;  // false: something was called that cannot be made again
};

// Where this thread notes its calls; null, where it does not.
inline thread_local Capture* capturing = nullptr;

// Notes a call, which must do what the kernel does that notes it.
template <typename Call>
void note(Call call) {
  if (capturing != nullptr) capturing->calls.emplace_back(call);
}

// Says that a kernel was called that is not noted.
inline void note_nothing() {
  if (capturing != nullptr) capturing->is_whole = false;
}

}  // namespace quire
