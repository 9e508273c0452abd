/* How fast can this processor multiply and add? Prints GFLOP/s of all OpenMP threads in the pairs of bfloat16 where it
 * has them, in float32 where not. Nothing but registers is touched, so no real product is faster. */
#include <omp.h>
#include <stdio.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

enum { CHAINS = 12, STEPS = 50000000 }; /* chains enough to hide the latency of an operation, few enough for registers */

#if defined(__AVX512BF16__)
enum { OPERATIONS = 64 }; /* of one instruction: 16 sums of 2 products */
typedef __m512 Vector;
static inline Vector step(Vector sum, Vector x) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)x); }
#elif defined(__AVX512F__)
enum { OPERATIONS = 32 };
typedef float Vector __attribute__((vector_size(64)));
static inline Vector step(Vector sum, Vector x) { return sum * x + x; }
#elif defined(__AVX__)
enum { OPERATIONS = 16 };
typedef float Vector __attribute__((vector_size(32)));
static inline Vector step(Vector sum, Vector x) { return sum * x + x; }
#else
enum { OPERATIONS = 8 };
typedef float Vector __attribute__((vector_size(16)));
static inline Vector step(Vector sum, Vector x) { return sum * x + x; }
#endif

int main(void) {
    double total = 0;
    int num_threads = 0;
    double started = omp_get_wtime();
#pragma omp parallel reduction(+ : total, num_threads)
    {
        Vector sums[CHAINS], x;
        for (unsigned lane = 0; lane < sizeof x / sizeof(float); lane++) ((float *)&x)[lane] = 0.5f;
        for (int chain = 0; chain < CHAINS; chain++) sums[chain] = x;
        for (long i = 0; i < STEPS; i++) {
            __asm__ volatile("" : "+x"(x)); /* unknown to the compiler, so that it cannot do the loop in its head */
#pragma GCC unroll 12
            for (int chain = 0; chain < CHAINS; chain++) sums[chain] = step(sums[chain], x);
        }
        for (int chain = 0; chain < CHAINS; chain++) total += ((float *)&sums[chain])[0];
        num_threads++;
    }
    double elapsed_s = omp_get_wtime() - started;
    /* The sum is printed so that the compiler cannot drop the loop. */
    printf("%.2f %g\n", (double)OPERATIONS * CHAINS * STEPS * num_threads / elapsed_s / 1e9, total);
    return 0;
}
