// Functions for the loader: version, instruction-set levels of the processor, and the thread functions of kernels.
#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "cache.h"
#include "parallel.h"

namespace quire {
ParallelFor parallel_for = nullptr;
GetNumThreads get_num_threads = nullptr;
}  // namespace quire

// Incremented with every change of a signature or a structure; the loader rejects a library with another number.
QUIRE_EXPORT int32_t quire_interface_version() { return 35; }

// Returns whether this processor supports a level; called in the portable library.
QUIRE_EXPORT bool quire_has_level(const char* level) {
  const auto is = [=](const char* name) { return std::strcmp(level, name) == 0; };
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (is("avx512_bf16"))
    return has_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (is("avx512")) return has_avx512;
  if (is("avx_vnni")) {
    // Not every compiler of these sources knows its name. AVX-512 does not include it.
    unsigned eax = 0, ebx, ecx, edx;
    return has_avx2 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
  }
  if (is("avx2")) return has_avx2;
#endif
  return is("portable");
}

QUIRE_EXPORT void quire_use_threads(quire::ParallelFor parallel_for, quire::GetNumThreads get_num_threads) {
  quire::parallel_for = parallel_for;
  quire::get_num_threads = get_num_threads;
}
