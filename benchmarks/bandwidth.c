/* How fast can memory be read right now? Prints GB/s over several passes on all OpenMP threads.
 * Decoding is bound by this number, and on shared machines it moves from minute to minute. */
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { PASSES = 6 };
static const size_t NUM_WORDS = (size_t)64 << 20; /* 512 MiB: far past any cache */

int main(void) {
    uint64_t *words = aligned_alloc(64, NUM_WORDS * sizeof *words);
    if (!words) return 1;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < NUM_WORDS; i++) words[i] = i; /* each thread touches the pages that it will read */

    uint64_t sum = 0;
    double started = omp_get_wtime();
    for (int pass = 0; pass < PASSES; pass++) {
#pragma omp parallel for schedule(static) reduction(+ : sum)
        for (size_t i = 0; i < NUM_WORDS; i++) sum += words[i] ^ (uint64_t)pass;
    }
    double elapsed_s = omp_get_wtime() - started;
    /* The sum is printed so that the compiler cannot drop the reads. */
    printf("%.2f %llu\n", (double)NUM_WORDS * sizeof *words * PASSES / elapsed_s / 1e9, (unsigned long long)sum);
    free(words);
    return 0;
}
