/* Counts the live memory of torch's CPU allocator, which allocates only with posix_memalign.
 *
 * torch's profiler cannot count it: it misses memory that another thread (gloo's, for example) frees.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#define SLOTS (1u << 21) /* of an open-addressing hash table of pointers */
#define GONE ((void *)1)

static void *pointers[SLOTS];
static size_t sizes[SLOTS];
static long live, peak;
static pthread_spinlock_t lock;
static int (*real_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);

__attribute__((constructor)) static void find(void) {
    pthread_spin_init(&lock, PTHREAD_PROCESS_PRIVATE);
    real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    real_free = dlsym(RTLD_NEXT, "free");
}

static unsigned first_slot(void *pointer) {
    return (unsigned)((((uintptr_t)pointer >> 4) * 0x9E3779B97F4A7C15ull) >> 43);
}

int posix_memalign(void **pointer, size_t alignment, size_t size) {
    if (!real_memalign) find();
    int error = real_memalign(pointer, alignment, size);
    if (!error && size) {
        pthread_spin_lock(&lock);
        unsigned slot = first_slot(*pointer);
        while (pointers[slot] && pointers[slot] != GONE) slot = (slot + 1) & (SLOTS - 1);
        pointers[slot] = *pointer;
        sizes[slot] = size;
        live += size;
        if (live > peak) peak = live;
        pthread_spin_unlock(&lock);
    }
    return error;
}

void free(void *pointer) {
    if (!real_free) find();
    if (pointer && ((uintptr_t)pointer & 63) == 0) { /* torch aligns to 64 bytes */
        pthread_spin_lock(&lock);
        for (unsigned slot = first_slot(pointer); pointers[slot]; slot = (slot + 1) & (SLOTS - 1))
            if (pointers[slot] == pointer) {
                live -= sizes[slot];
                pointers[slot] = GONE;
                break;
            }
        pthread_spin_unlock(&lock);
    }
    real_free(pointer);
}

long heap_live(void) { return live; }
long heap_peak(void) { return peak; }
void heap_restart(void) { peak = live; }
