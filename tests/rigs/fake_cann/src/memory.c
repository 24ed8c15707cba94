/* Device memory: anonymous files, mapped, so that another process can map them too and nothing outlives its users. */
#define _GNU_SOURCE
#include "memory.h"
#include "stream.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static allocation *allocations;
static size_t used_bytes[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t capacity(void) { return (size_t)fake_cann_setting("FAKE_CANN_HBM_MB", 4096) << 20; }

bool memory_find(const void *pointer, allocation *found) {
    pthread_mutex_lock(&lock);
    allocation *a = allocations;
    while (a && !((char *)pointer >= a->start && (char *)pointer < a->start + a->size)) a = a->next;
    if (a) *found = *a;
    pthread_mutex_unlock(&lock);
    return a != NULL;
}

static allocation *map_new(size_t size) {
    int file = memfd_create("fake-hbm", MFD_CLOEXEC);
    if (file < 0) return NULL;
    char *start = ftruncate(file, (off_t)size) ? MAP_FAILED : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (start == MAP_FAILED) {
        close(file);
        return NULL;
    }
    allocation *a = malloc(sizeof *a);
    *a = (allocation){.start = start, .size = size, .file = file, .device = current_device()};
    return a;
}

aclError aclrtMalloc(void **pointer, size_t size, int policy) {
    ENTER();
    if (current_device() < 0) return NO_CONTEXT;
    if (!size) return PARAM_INVALID;
    pthread_mutex_lock(&lock);
    allocation *a = used_bytes[current_device()] + size > capacity() ? NULL : map_new(size);
    if (a) {
        used_bytes[a->device] += size;
        a->next = allocations;
        allocations = a;
        *pointer = a->start;
    }
    pthread_mutex_unlock(&lock);
    return a ? OK : MEMORY_ALLOCATION;
}

aclError aclrtMallocAlign32(void **pointer, size_t size, int policy) { return aclrtMalloc(pointer, size, policy); }

/* As on a device, what the streams still do with the memory comes first. */
aclError aclrtFree(void *pointer) {
    ENTER();
    stream_drain_all();
    pthread_mutex_lock(&lock);
    allocation **link = &allocations;
    while (*link && (*link)->start != pointer) link = &(*link)->next;
    allocation *a = *link;
    if (a) {
        *link = a->next;
        used_bytes[a->device] -= a->size;
        munmap(a->start, a->size);
        close(a->file);
        free(a);
    }
    pthread_mutex_unlock(&lock);
    return a ? OK : PARAM_INVALID;
}

aclError aclrtMallocHost(void **pointer, size_t size) {
    ENTER();
    return posix_memalign(pointer, 64, size ? size : 64) ? MEMORY_ALLOCATION : OK;
}

aclError aclrtFreeHost(void *pointer) {
    stream_drain_all();
    free(pointer);
    return OK;
}

aclError aclrtGetMemInfo(int kind, size_t *available, size_t *total) {
    ENTER();
    if (current_device() < 0) return NO_CONTEXT;
    pthread_mutex_lock(&lock);
    *total = capacity();
    *available = *total - used_bytes[current_device()];
    pthread_mutex_unlock(&lock);
    return OK;
}

typedef struct {
    void *to;
    const void *from; /* NULL: set to `value` */
    size_t size;
    int value;
} transfer;

static int run_transfer(void *arguments) {
    transfer *t = arguments;
    if (t->from)
        memmove(t->to, t->from, t->size);
    else
        memset(t->to, t->value, t->size);
    return OK;
}

/* The blocking calls know no stream: they do not wait for any. */
aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
    ENTER();
    if (size > room) return PARAM_INVALID;
    memmove(to, from, size);
    return OK;
}

aclError aclrtMemset(void *to, size_t room, int32_t value, size_t size) {
    ENTER();
    if (size > room) return PARAM_INVALID;
    memset(to, value, size);
    return OK;
}

aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, stream *s) {
    ENTER();
    if (size > room || (size && !from)) return PARAM_INVALID;
    transfer t = {.to = to, .from = from, .size = size};
    return size ? stream_submit(s, run_transfer, &t, sizeof t) : OK;
}

aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, stream *s) {
    ENTER();
    if (size > room) return PARAM_INVALID;
    transfer t = {.to = to, .size = size, .value = value};
    return stream_submit(s, run_transfer, &t, sizeof t);
}
