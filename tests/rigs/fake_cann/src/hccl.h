/* What the two halves of the stand-in HCCL share: a communicator is a mesh of loopback connections. */
#pragma once
#include "fake_cann.h"

typedef int HcclResult;

/* Values of hccl/hccl_types.h. */
enum {
    HCCL_PARAMETER = 1,
    HCCL_INTERNAL = 4,
    HCCL_NOT_SUPPORTED = 5,
    HCCL_TIMEOUT = 9,
    HCCL_CONNECT = 11,
    HCCL_TRANSFER = 13,
};

enum { MAX_RANKS = 16, NAME_BYTES = 128, ROOT_INFO_BYTES = 4108 };

typedef struct {
    int size, rank, device;
    int peers[MAX_RANKS]; /* descriptors; -1 for this rank */
    int async_error;
    bool destroyed;
    char name[NAME_BYTES];
} communicator;

/* HCCL forbids two threads of a process to call it at once: false for the second one. */
bool hccl_enter(void);
void hccl_leave(void);

HcclResult put(int peer, const void *bytes, size_t size);
HcclResult get(int peer, void *bytes, size_t size);
