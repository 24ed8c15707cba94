#define _GNU_SOURCE
#include "ipc_event.h"
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE_BYTES = 4096 };

typedef struct {
    atomic_uint_fast64_t submitted, completed;
} page;

struct ipc_event {
    page *page;
    int file;
};

static ipc_event *map(int file) {
    void *memory = file < 0 ? MAP_FAILED : mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) {
        if (file >= 0) close(file);
        return NULL;
    }
    ipc_event *e = malloc(sizeof *e);
    *e = (ipc_event){memory, file};
    return e;
}

ipc_event *ipc_event_create(void) {
    int file = memfd_create("fake-event", MFD_CLOEXEC);
    if (file >= 0 && ftruncate(file, PAGE_BYTES)) return NULL;
    return map(file);
}

ipc_event *ipc_event_open(const ipc_event_handle *handle) {
    int pid, file;
    char path[64];
    if (sscanf(handle->text, "event:%d:%d", &pid, &file) != 2) return NULL;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, file);
    return map(open(path, O_RDWR | O_CLOEXEC));
}

bool ipc_event_export(ipc_event *e, ipc_event_handle *handle) {
    *handle = (ipc_event_handle){{0}};
    return snprintf(handle->text, sizeof handle->text, "event:%d:%d", getpid(), e->file) > 0;
}

void ipc_event_close(ipc_event *e) {
    munmap(e->page, PAGE_BYTES);
    close(e->file);
    free(e);
}

uint64_t ipc_event_submit(ipc_event *e) { return atomic_fetch_add(&e->page->submitted, 1) + 1; }
uint64_t ipc_event_submitted(ipc_event *e) { return atomic_load(&e->page->submitted); }
/* Records on several streams may complete in any order; the callers share a lock. */
void ipc_event_complete(ipc_event *e, uint64_t generation) {
    if (atomic_load(&e->page->completed) < generation) atomic_store(&e->page->completed, generation);
}
uint64_t ipc_event_completed(ipc_event *e) { return atomic_load(&e->page->completed); }
