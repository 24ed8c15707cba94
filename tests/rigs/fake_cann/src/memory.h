#pragma once
#include "fake_cann.h"

typedef struct allocation {
    char *start;
    size_t size;
    int file, device;
    struct allocation *next;
} allocation;

/* The allocation that holds `pointer`. */
bool memory_find(const void *pointer, allocation *found);
