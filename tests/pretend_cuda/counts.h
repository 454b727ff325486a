// Counts of calls to the device, and its memory: shared by the libraries of the pretended device.
#pragma once
#include <atomic>
#include <cstddef>

#define EXPORT extern "C" __attribute__((visibility("default")))

// The order is that of COUNTS in tests/support/pretended_counts.py.
enum Count {
    LAUNCHES, PRODUCTS, TO_DEVICE, TO_HOST, ON_DEVICE, UNPINNED, FILLS, WAITS, EVENTS, STREAM_WAITS, SEGMENTS, PINNED,
    COLLECTIVES, REGISTERED,
    NUMBER_OF_COUNTS
};
extern std::atomic<long long> counts[NUMBER_OF_COUNTS];

// Memory of a device: address space that is reserved, of which `use` bytes count. Both return false if there is none.
bool reserve(void** address, size_t bytes, int device);
void release(void* address);
bool use(int device, long long bytes);
