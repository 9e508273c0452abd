// Functions for the loader: version, best instruction-set level, and the thread functions that kernels use.
#include "cache.h"
#include "parallel.h"

namespace quire {
ParallelFor parallel_for = nullptr;
GetNumThreads get_num_threads = nullptr;
}  // namespace quire

// Incremented with every change of a signature or a structure; the loader rejects a library with another number.
QUIRE_EXPORT int32_t quire_interface_version() { return 20; }

// Returns the best level that this processor supports, among those of the build; called in the portable library.
QUIRE_EXPORT const char* quire_best_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) return "avx512_bf16";
  if (has_avx512) return "avx512";
  if (has_avx2) return "avx2";
#endif
  return "portable";
}

QUIRE_EXPORT void quire_use_threads(quire::ParallelFor parallel_for, quire::GetNumThreads get_num_threads) {
  quire::parallel_for = parallel_for;
  quire::get_num_threads = get_num_threads;
}
