// Calls functions of a library over memory that is read from standard input, and writes that memory to standard output.
//
// kernel_calls LIBRARY CALL [-- CALL ...], where a call is the name of a function and its arguments: i5 is an integer,
// p64 the address of byte 64, f0.5 a float, of which there is one at most. Integers and addresses are passed as 64 bits
// each, in their order: the calling conventions of x86-64 and aarch64 take the float by itself, and ignore what a
// function does not take. "store" is no function of the library: it writes its second argument to the address that is its
// first.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

int main(int argc, char** argv) {
  std::vector<char> input;
  char part[65536];
  for (size_t count; (count = fread(part, 1, sizeof part, stdin)) > 0;) input.insert(input.end(), part, part + count);
  const size_t size = (input.size() + 63) / 64 * 64;
  char* const memory = static_cast<char*>(aligned_alloc(64, size));
  memcpy(memory, input.data(), input.size());

  void* const library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) return fprintf(stderr, "%s\n", dlerror()), 1;
  for (int at = 2; at < argc; ++at) {
    const bool stores = strcmp(argv[at], "store") == 0;
    void* const function = dlsym(library, argv[at++]);
    if (function == nullptr && !stores) return fprintf(stderr, "%s\n", dlerror()), 1;
    int64_t numbers[12] = {};
    float real = 0;
    int count = 0;
    for (; at < argc && strcmp(argv[at], "--") != 0; ++at) {
      const char* const given = argv[at] + 1;
      if (argv[at][0] == 'f') {
        real = strtof(given, nullptr);
      } else {
        numbers[count++] = atoll(given) + (argv[at][0] == 'p' ? reinterpret_cast<int64_t>(memory) : 0);
      }
    }
    using Function = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                              int64_t, int64_t, float);
    const int64_t* n = numbers;
    if (stores) {
      *reinterpret_cast<int64_t*>(n[0]) = n[1];
      continue;
    }
    reinterpret_cast<Function>(function)(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], real);
  }
  return fwrite(memory, 1, input.size(), stdout) == input.size() ? 0 : 1;
}
