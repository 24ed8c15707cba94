/* Device memory in another process: the key names the owner's anonymous file, which lives as long as the owner does. */
#include "memory.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_IMPORTS = 256, KEY_BYTES = 65 };

typedef struct {
    char key[KEY_BYTES];
    void *start;
    size_t size;
} mapping;

static mapping imports[MAX_IMPORTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Only whole allocations are exported, and only to processes of the same user. */
aclError aclrtIpcMemGetExportKey(void *pointer, size_t size, char *key, size_t room, uint64_t flags) {
    ENTER();
    allocation found;
    if (room < KEY_BYTES || !memory_find(pointer, &found) || pointer != found.start) return PARAM_INVALID;
    memset(key, 0, room);
    snprintf(key, KEY_BYTES, "%d:%d:%zu", getpid(), found.file, found.size);
    return OK;
}

/* Not what this process has exported itself. */
static void *map(const char *key, size_t *size) {
    int pid, file;
    char path[64];
    if (sscanf(key, "%d:%d:%zu", &pid, &file, size) != 3 || pid == getpid()) return MAP_FAILED;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, file);
    int mine = open(path, O_RDWR | O_CLOEXEC);
    if (mine < 0) return MAP_FAILED;
    void *start = mmap(NULL, *size, PROT_READ | PROT_WRITE, MAP_SHARED, mine, 0);
    close(mine);
    return start;
}

static mapping *find(const char *key) {
    for (int i = 0; i < MAX_IMPORTS; i++)
        if (!strncmp(imports[i].key, key, KEY_BYTES)) return &imports[i];
    return NULL;
}

aclError aclrtIpcMemImportByKey(void **pointer, const char *key, uint64_t flags) {
    ENTER();
    pthread_mutex_lock(&lock);
    mapping *free_slot = find("");
    size_t size;
    void *start = free_slot && *key ? map(key, &size) : MAP_FAILED;
    if (start != MAP_FAILED) {
        *free_slot = (mapping){.start = start, .size = size};
        snprintf(free_slot->key, KEY_BYTES, "%s", key);
        *pointer = start;
    }
    pthread_mutex_unlock(&lock);
    return start == MAP_FAILED ? PARAM_INVALID : OK;
}

/* For the owner there is nothing to undo: the memory goes with its last mapping. */
aclError aclrtIpcMemClose(const char *key) {
    ENTER();
    pthread_mutex_lock(&lock);
    mapping *found = *key ? find(key) : NULL;
    if (found) {
        munmap(found->start, found->size);
        *found = (mapping){{0}};
    }
    pthread_mutex_unlock(&lock);
    return OK;
}

aclError aclrtIpcMemSetImportPid(const char *key, int32_t *pids, size_t count) { return OK; }
